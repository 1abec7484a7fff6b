"""What a layer keeps between steps, declared as frozen specs. The pool allocates what is declared. No torch.

A layer declares one spec or several (a window, compressed entries and a running state). Layers with an equal spec
form a group; a group has one block table. A block is stored page-first: all layers of the group contiguously, so
that one block is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token, 8-bit floats where dtype_bytes is 1. `window` None keeps all, else only the last
    `window` tokens are read."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    dtype_bytes: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return self.num_kv_heads * (self.head_dim + self.value_dim) * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class LatentKV:
    """MLA: one compressed latent and one rotated key part a token, shared by all heads. latent_bytes: of a number of
    the latent where it is another than dtype_bytes; 1 is an 8-bit float."""

    latent_dim: int
    rope_dim: int
    dtype_bytes: int
    window: int | None = None
    latent_bytes: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.latent_dim * (self.latent_bytes or self.dtype_bytes) + self.rope_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class CompressedKV:
    """One entry of `dim` values for every `ratio` tokens, written when the last of them is computed.

    A block of block_size tokens holds block_size / ratio entries, so block_size must be a multiple of `ratio`.
    """

    dim: int
    ratio: int
    dtype_bytes: int

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token in one layer: an entry's, shared by the tokens that it stands for."""
        return self.dim * self.dtype_bytes / self.ratio


@dataclass(frozen=True, slots=True)
class Recurrent:
    """State of fixed size a request, updated in place (gated delta rule, causal convolution)."""

    shapes: tuple[tuple[int, ...], ...]
    dtype_bytes: tuple[int, ...]

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one request in one layer."""
        total = 0
        for shape, size in zip(self.shapes, self.dtype_bytes, strict=True):
            count = 1
            for dim in shape:
                count *= dim
            total += count * size
        return total


LayerSpec = PagedKV | LatentKV | CompressedKV | Recurrent


def window_of(spec: LayerSpec) -> int | None:
    """The last tokens that a layer reads; None where it reads all, or keeps no tokens."""
    return spec.window if isinstance(spec, PagedKV | LatentKV) else None


@dataclass(frozen=True, slots=True)
class Group:
    """Layers (by index) that share one spec and one block table."""

    spec: LayerSpec
    layers: tuple[int, ...]

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block. Raises ValueError when the spec's entries do not fill whole blocks."""
        if isinstance(self.spec, Recurrent):
            return 0
        if isinstance(self.spec, CompressedKV) and block_size % self.spec.ratio:
            raise ValueError(
                f"a layer keeps one entry for every {self.spec.ratio} tokens, which blocks of {block_size} tokens "
                f"cannot hold: set block_size to a multiple of {self.spec.ratio}"
            )
        return int(self.spec.bytes_per_token * block_size) * len(self.layers)


def group_layers(specs: Sequence[tuple[LayerSpec, ...]]) -> tuple[Group, ...]:
    """Groups in order of each spec's first layer. specs[i] is what layer i keeps, each spec at most once."""
    order: dict[LayerSpec, list[int]] = {}
    for layer, kept in enumerate(specs):
        for spec in kept:
            order.setdefault(spec, []).append(layer)
    return tuple(Group(spec, tuple(layers)) for spec, layers in order.items())


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The pools that a runner allocated: blocks for each group, and slots for recurrent state.

    With several `ranks` the tokens of a block are shared out in runs, of which `rank` keeps the one of its number.
    Block 0 of every group and state slot 0 are reserved for padding; the manager never hands them out.
    """

    groups: tuple[Group, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    num_state_slots: int = 0
    rank: int = 0
    ranks: int = 1

    @property
    def block_share(self) -> int:
        """Tokens of a block that are here."""
        return self.block_size // self.ranks

    @property
    def is_fp8(self) -> bool:
        """Whether any group holds 8-bit floats."""
        kept = [group.spec for group in self.groups]
        paged = any(isinstance(spec, PagedKV) and spec.dtype_bytes == 1 for spec in kept)
        return paged or any(isinstance(spec, LatentKV) and spec.latent_bytes == 1 for spec in kept)
