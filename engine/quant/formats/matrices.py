"""What stands beside a module in a checkpoint, held to what its layout stores there, and scales as they were read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from engine.weights.checkpoint import Entry, WeightsError, listed

# What a scale is stored as: numbers of other kinds are counts, or exponents, which mean something else.
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What exponents are stored as.
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)


def unlike(
    stored: str,
    module: str,
    entries: Mapping[str, Entry],
    kinds: Mapping[str, tuple[torch.dtype, ...]],
    others: Sequence[str] = (),
) -> str | None:
    """A sentence where tensors of a module are missing or are no matrices of their kinds, else None.

    stored: the layout's name. kinds: by the end of a tensor's name. others: ends of tensors of which the format looks
    at what they are by itself.
    """
    absent = [f"{module}.{end}" for end in (*kinds, *others) if f"{module}.{end}" not in entries]
    if absent:
        return f"config.json says that {module} is stored as {stored}, and {listed(absent)} is missing"
    for end, allowed in kinds.items():
        entry = entries[f"{module}.{end}"]
        if entry.dtype not in allowed or len(entry.shape) != 2:
            found = str(entry.dtype).removeprefix("torch.")
            return f"{entry.name} is {found} {list(entry.shape)}, which {stored} does not store there"
    return None


def no_scale(
    module: str, ends: Sequence[str], entries: Mapping[str, Entry], kinds: Collection[torch.dtype] = SCALES
) -> str | None:
    """A sentence where a scale of `module`, named by the end of its name, is there and is of none of the `kinds`."""
    for end in ends:
        entry = entries.get(f"{module}.{end}")
        if entry is not None and entry.dtype not in kinds:
            found = str(entry.dtype).removeprefix("torch.")
            return f"{entry.name} is stored as {found}, and scales are floating-point numbers"
    return None


def check_scales(parameters: Mapping[str, torch.Tensor], exact_inputs: bool) -> None:
    """Look at `scale` and, unless products take inputs as they are, at the largest `input_scale`, which is theirs.

    Raises WeightsError for what is no finite number, and for inputs that are scaled by zero or less.
    """
    if not bool(torch.isfinite(parameters["scale"]).all()):
        raise WeightsError("a scale of them is no finite number")
    inputs = None if exact_inputs else parameters.get("input_scale")
    if inputs is not None and not 0 < float(inputs.amax()) < float("inf"):
        raise WeightsError(
            "the scale of their inputs is no finite number above zero (weights.activations = 16bit does without it)"
        )
