"""The interface of a format: the parameters that hold a weight, what fills them, and the value that kernels take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch

from engine.weights.checkpoint import Entry
from engine.weights.rules import Rule, Shape
from kernels.weight import Weight as Value

# Of each parameter its shape and dtype, by name.
Declared = dict[str, tuple[Shape, torch.dtype]]


class Format(Protocol):
    """One weight's format, made by `engine.quant.plan` when the checkpoint's tensors are known."""

    def declare(self, shape: Shape, dtype: torch.dtype) -> Declared:
        """The parameters of a weight of `shape` [.., N, K] whose products are taken in `dtype`."""
        ...

    def rules(self, rule: Rule, shape: Shape) -> list[Rule]:
        """What fills those parameters, given the weight's shape and the rule that names it and its sources' `.weight`
        tensors. A rule's target is the weight's, a dot and the parameter's name."""
        ...

    def value(self, parameters: Mapping[str, torch.Tensor]) -> Value:
        """What kernels take, made of the filled parameters."""
        ...

    def draw(self, parameters: Mapping[str, torch.Tensor], std: float, generator: torch.Generator) -> None:
        """Fill the parameters with random numbers whose weight has the standard deviation `std`."""
        ...

    def check(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Look at the filled parameters. Raises WeightsError with a sentence for what kernels could not honour."""
        return None


class Kind(Protocol):
    """A module of `engine.quant.formats`: how weights of one scheme are found, held, or made dense."""

    @property
    def DATA(self) -> tuple[str, ...]:
        """What a checkpoint may call a module's numbers: the ends of names."""
        ...

    @property
    def SPLITS(self) -> bool:
        """Whether one source's columns may be shared out among matrices of a table, as shared experts' are."""
        ...

    def lacking(self, scheme: Any, module: str, entries: Mapping[str, Entry]) -> str | None:
        """A sentence where the tensors of `module` are not what the scheme needs."""
        ...

    def alike(self, scheme: Any, module: str, entries: Mapping[str, Entry]) -> Hashable:
        """What else than the scheme must be the same of modules that are held in one format."""
        ...

    def make(
        self,
        scheme: Any,
        modules: Sequence[str],
        rule: Rule,
        shape: Shape,
        entries: Mapping[str, Entry] | None,
        exact_inputs: bool,
    ) -> Format:
        """The format of the weight that `rule` fills from `modules`. entries None: a checkpoint that is not there, for
        random weights. exact_inputs: products take their inputs as they are, whatever the scheme says."""
        ...

    def dequantized(self, scheme: Any, modules: Sequence[str], rule: Rule, entries: Mapping[str, Entry]) -> Rule:
        """What fills a weight whose reader takes dense numbers alone."""
        ...
