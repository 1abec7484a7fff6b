"""The interface of a quantization method, as a config.json describes it, and the most common one. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.quant.module_names import NOTHING, ModuleNames
from engine.quant.scheme import Scheme


class Method(Protocol):
    """What is said of every module of a checkpoint. Its tensors tell what of it is true (`engine.quant.plan`)."""

    @property
    def steps(self) -> int:
        """The most steps that `scheme` takes for one module."""
        ...

    def scheme(self, module: str) -> Scheme | None:
        """How the weight of `module` (a name of the checkpoint, without `.weight`) is stored; None: as it is."""
        ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every projection is stored as `stored`, less those that `ignored` holds.

    experts: how routed experts are stored, where that is another way.
    """

    stored: Scheme
    ignored: ModuleNames = NOTHING
    experts: Scheme | None = None

    @property
    def steps(self) -> int:
        return self.ignored.steps

    def scheme(self, module: str) -> Scheme | None:
        if self.ignored.hold(module):
            return None
        return self.experts if self.experts is not None and ".experts." in module else self.stored
