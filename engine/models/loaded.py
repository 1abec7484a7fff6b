"""What the loader fills: a module's parameters by kind."""

from __future__ import annotations

import torch
from torch import nn

from engine.layers.moe import Moe
from engine.quant.weight import Weight


class Loaded(nn.Module):
    """A module that is built without memory: `materialize` gives it some, then the loader fills it."""

    def materialize(self, device: torch.device) -> None:
        """Give every parameter memory on `device`, uninitialised but for integers on a GPU, which are zeros: some are
        places of inputs, and steps that compile kernels run there before the weights are read."""
        read_before = device.type != "cpu"

        # Not to_empty(), whose empty_like() of a tensor without memory imports sympy: 0.4 s and 40 MB.
        def made(held: torch.Tensor) -> torch.Tensor:
            how = torch.zeros if read_before and not held.is_floating_point() else torch.empty
            return how(held.shape, dtype=held.dtype, device=device)

        self._apply(made)

    @property
    def weights(self) -> dict[str, Weight]:
        """Weights of projections by name; one that stands in two places goes by the first."""
        return {name: module for name, module in self.named_modules() if isinstance(module, Weight)}

    @property
    def others(self) -> dict[str, nn.Parameter]:
        """Parameters that belong to no weight: norms, biases, routers, tables."""
        held = {id(parameter) for weight in self.weights.values() for parameter in weight.parameters()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in held}

    @property
    def bounds(self) -> dict[str, int]:
        """Parameters that hold ids, by name, and what these are below."""
        experts = {name: module for name, module in self.named_modules() if isinstance(module, Moe)}
        return {f"{name}.{part}": below for name, moe in experts.items() for part, below in moe.bounds.items()}

    @property
    def num_bytes(self) -> int:
        """What the weights take."""
        return sum(parameter.nbytes for parameter in self.parameters())
