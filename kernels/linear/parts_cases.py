"""Inputs of products with weights of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kernels.registry import Case, Tolerance
from kernels.weight import Dense, Parts


def with_parts(plain: Case, others: Sequence[Case], tolerance: Tolerance) -> Case:
    """A case of a dense weight with those of other cases in the place of its last rows."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        given = plain.make(device, generator)
        held = [other.make(device, generator)["weight"] for other in others]
        left = given["weight"].shape[0] - sum(weight.shape[0] for weight in held)
        first = [Dense(given["weight"].data[:left])] if left else []
        return {**given, "weight": Parts((*first, *held))}

    return replace(plain, make=make, tolerance=tolerance)
