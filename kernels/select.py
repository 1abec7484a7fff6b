"""Binds each op to its reference or its kernel, once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

from kernels.registry import Choice, Op, registry
from kernels.workspace import Workspace

if TYPE_CHECKING:

    class Ops:
        """The bound ops. Signatures and shapes are those of each op's reference."""

        move_words: Callable[..., None]
        embedding: Callable[..., torch.Tensor]
        rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        linear: Callable[..., torch.Tensor]
        linear_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
        gated_mlp: Callable[..., torch.Tensor]
        rope_kv_write: Callable[..., torch.Tensor]
        paged_attention: Callable[..., torch.Tensor]
        rope_attention: Callable[..., torch.Tensor]
        gated_activation: Callable[..., torch.Tensor]
        penalties: Callable[..., None]
        mask_logits: Callable[..., None]
        sample: Callable[..., torch.Tensor]
        logprobs: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

else:
    Ops = SimpleNamespace


def select(workspace: Workspace, choice: Choice = "auto", direct_copies: bool = True) -> Ops:
    """Ops for the workspace's device: kernels on a GPU and references on CPU, unless `choice` says otherwise. Each is
    handed `workspace`, which carries the engine's switches. direct_copies lets kernels reach into pinned host memory.

    Raises ValueError when compiled kernels are asked for on a device that cannot run them.
    """
    device = workspace.device
    if choice == "auto":
        choice = "triton" if device.type == "cuda" else "reference"
    if choice == "triton" and device.type != "cuda":
        raise ValueError(
            f"kernels='triton' needs a CUDA device and this engine runs on {device.type}: use kernels='reference'"
        )
    bound = {op.name: op.bound(workspace) if choice == "triton" else op.reference for op in registry()}
    if not direct_copies:
        bound["move_words"] = Op("move_words").reference
    return cast(Ops, SimpleNamespace(**bound))
