"""The interface of a quantization method, as a config.json describes it. No torch."""

from __future__ import annotations

from typing import Protocol

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
