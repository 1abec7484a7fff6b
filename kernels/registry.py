"""One registry of ops: tests, benchmarks, docs and the engine read it.

An op is a folder: `reference.py` (torch, the definition and the CPU backend), `kernel.py` (Triton, the same signature
behind a `Workspace`) and `cases.py` (inputs, tolerances, bytes and flops). `select.select(workspace)` binds every op
once, at start.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from kernels.workspace import Workspace

Choice = Literal["auto", "reference", "triton"]

OPS = (
    "repack",
    "round_rows",
    "move_words",
    "shift_entries",
    "put_drafts",
    "draft_places",
    "token_inputs",
    "embedding",
    "rms_norm",
    "norm_add",
    "quantize",
    "round_fp4",
    "linear",
    "linear_norm",
    "gated_mlp",
    "peer_sum",
    "peer_gather",
    "rope_kv_write",
    "paged_attention",
    "rope_attention",
    "gated_activation",
    "latent_write",
    "latent_attention",
    "latent_partials",
    "peer_merge",
    "causal_conv",
    "gated_delta",
    "gated_norm",
    "delta_net",
    "sigmoid_gate",
    "rotate_tail",
    "shared_kv_write",
    "compress_kv",
    "index_topk",
    "sparse_attention",
    "group_linear",
    "hyper_mix",
    "hyper_merge",
    "moe_route",
    "moe_gemm",
    "moe",
    "penalties",
    "mask_logits",
    "sample",
    "sample_candidates",
    "sample_merge",
    "keep_tokens",
    "accept_drafts",
    "logprobs",
)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Two numbers, never relaxed: largest error over the largest magnitude, and RMS error over RMS. 0, 0 is exact."""

    max_rel: float
    rms: float


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs.

    make(device, generator) gives keyword arguments, fresh each call. `mutated` names the arguments the op writes
    into; they are compared besides the returned tensors. bytes and flops are the least the op must move and do.
    `small` cases are cheap enough for Triton's interpreter.
    """

    name: str
    dtype: torch.dtype
    make: Callable[[torch.device, torch.Generator], dict[str, Any]]
    tolerance: Tolerance
    bytes: int
    flops: int
    mutated: tuple[str, ...] = ()
    small: bool = True


@dataclass(frozen=True, slots=True)
class Op:
    """An op by name, its two implementations and its cases, imported when first asked for."""

    name: str

    @property
    def reference(self) -> Callable[..., Any]:
        fn: Callable[..., Any] = getattr(importlib.import_module(f"kernels.{self.name}.reference"), self.name)
        return fn

    @property
    def kernel(self) -> Callable[..., Any]:
        fn: Callable[..., Any] = getattr(importlib.import_module(f"kernels.{self.name}.kernel"), self.name)
        return fn

    def bound(self, workspace: Workspace) -> Callable[..., Any]:
        """The kernel with the reference's signature."""
        return partial(self.kernel, workspace)

    def cases(self) -> list[Case]:
        made: list[Case] = importlib.import_module(f"kernels.{self.name}.cases").cases()
        return made


def registry() -> Iterator[Op]:
    """Every op: what weights are loaded by, then in the order of a decoder step."""
    return (Op(name) for name in OPS)
