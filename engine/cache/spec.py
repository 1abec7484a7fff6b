"""What a layer keeps between steps, declared as frozen specs. The pool allocates what is declared. No torch.

Layers with equal specs form a group; a group has one block table. A block is stored page-first: all layers of the
group contiguously, so that one block is one copy.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of every token. `window` None keeps all, else only the last `window` tokens are read."""

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
    """MLA: one compressed latent and one rotated key part a token, shared by all heads."""

    latent_dim: int
    rope_dim: int
    dtype_bytes: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return (self.latent_dim + self.rope_dim) * self.dtype_bytes


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


LayerSpec = PagedKV | LatentKV | Recurrent


@dataclass(frozen=True, slots=True)
class Group:
    """Layers (by index) that share one spec and one block table."""

    spec: LayerSpec
    layers: tuple[int, ...]

    def block_bytes(self, block_size: int) -> int:
        if isinstance(self.spec, Recurrent):
            return 0
        return self.spec.bytes_per_token * block_size * len(self.layers)


def group_layers(specs: list[LayerSpec]) -> tuple[Group, ...]:
    """Groups in order of each spec's first layer."""
    order: dict[LayerSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        order.setdefault(spec, []).append(layer)
    return tuple(Group(spec, tuple(layers)) for spec, layers in order.items())


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The pools that a runner allocated: blocks for each group, and slots for recurrent state.

    Block 0 of every group and state slot 0 are reserved for padding; the manager never hands them out.
    """

    groups: tuple[Group, ...]
    num_blocks: tuple[int, ...]
    block_size: int
    num_state_slots: int = 0
