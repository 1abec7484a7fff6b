"""A table of matrices of which some are quantized and the others are stored as they are: it is held dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.quant.scheme import Fp4Scheme, PackedScheme, Scheme
from engine.weights.rules import Rule, Shape, Transform, bound


@dataclass(frozen=True, slots=True)
class Either:
    """Of a source that other tensors stand beside `quantized`, of one by itself `alone` (None: what it is)."""

    quantized: Transform
    alone: Transform | None

    def bound(self, ops: object) -> Either:
        """As a transform may have it."""
        return Either(bound(self.quantized, ops), self.alone)

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        if len(shapes) > 1:
            return self.quantized.fits(shapes, view)
        return tuple(shapes[0]) == tuple(view) if self.alone is None else self.alone.fits(shapes, view)

    def __call__(self, tensors: Sequence[torch.Tensor], view: Shape) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if len(tensors) > 1:
            return self.quantized(tensors, view)
        return tensors[0] if self.alone is None else self.alone(tensors, view)


def scheme_of(schemes: Sequence[Scheme | None], exact_inputs: bool) -> Scheme | None:
    """The one way in which some of a table's matrices are quantized; None where there are several, where all are, or
    where products would quantize their inputs."""
    found = {scheme for scheme in schemes if scheme is not None}
    if len(found) != 1 or None not in schemes:
        return None
    (scheme,) = found
    if isinstance(scheme, PackedScheme):
        return scheme
    rounds = scheme.quantized_inputs if isinstance(scheme, Fp4Scheme) else _activations(scheme) != "as they are"
    return scheme if exact_inputs or not rounds else None


def _activations(scheme: Scheme) -> str:
    return getattr(scheme, "activations", "as they are")


def filled(rule: Rule, made: Rule, schemes: Sequence[Scheme | None]) -> Rule:
    """What fills the dense table of `rule`, given the rule `made` that dequantizes those of its sources that have a
    scheme."""
    assert made.transform is not None
    sources, beside = iter(made.sources), iter(made.beside)
    each = [
        (source, ()) if scheme is None else (next(sources), next(beside))
        for source, scheme in zip(rule.sources, schemes, strict=True)
    ]
    return Rule(
        made.target,
        tuple(source for source, _ in each),
        rule.combine,
        Either(made.transform, rule.transform),
        tuple(ends for _, ends in each),
        rule.splits,
    )
