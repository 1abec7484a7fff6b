"""What the kernels of chosen experts are launched on, whatever the kind of their weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernels.routing import ExpertBiases
from kernels.workspace import Workspace


class Operands(NamedTuple):
    """As in the reference; gate_up and down are tables of the kind that the launch is for."""

    workspace: Workspace
    x: torch.Tensor
    gate_up: Any
    down: Any
    weights: torch.Tensor
    experts: torch.Tensor
    residual: torch.Tensor | None
    activation: str
    limit: float | None
    num_shared: int
    biases: ExpertBiases | None
