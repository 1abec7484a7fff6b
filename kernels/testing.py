"""What tests and benchmarks of ops share: tolerances, comparison, poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch

from kernels.registry import Case, Op, Tolerance
from kernels.workspace import Workspace


@lru_cache(maxsize=1)
def workspace() -> Workspace:
    """The one of all tests and benchmarks of ops in this process, on the GPU where there is one: a kernel that leaves a
    counter behind spoils those after it."""
    return Workspace(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def bound(op: Op) -> Callable[..., Any]:
    """The op's kernel in that workspace."""
    return op.bound(workspace())


EXACT = Tolerance(0.0, 0.0)

# Both sides compute in float32 and round once; matrix units see operands of the input's dtype.
TOLERANCES = {
    torch.float32: Tolerance(max_rel=1e-5, rms=2e-6),
    torch.bfloat16: Tolerance(max_rel=1.6e-2, rms=8e-3),
    torch.float16: Tolerance(max_rel=2e-3, rms=1e-3),
}

# A ratio that stands between two 8-bit floats may be rounded to either: the largest are 32 of 448 apart.
ROUNDED = Tolerance(max_rel=8e-2, rms=5e-3)


# Numbers of a tensor that are drawn together.
_DRAWN_AT_ONCE = 1 << 28


def tolerance_of(case: Case, tensor: torch.Tensor) -> Tolerance:
    """For one of a case's results: 8-bit floats have their own."""
    return ROUNDED if tensor.dtype == torch.float8_e4m3fn else case.tolerance


def seeded(device: torch.device, seed: int = 0) -> torch.Generator:
    """A generator on `device`, so that large inputs are drawn where they are used."""
    return torch.Generator(device=device).manual_seed(seed)


def randn(
    generator: torch.Generator, device: torch.device, dtype: torch.dtype, *shape: int, scale: float = 1.0
) -> torch.Tensor:
    if len(shape) > 2 and math.prod(shape) > _DRAWN_AT_ONCE:
        # Experts of real sizes: in float32 they would take twice the memory.
        made = torch.empty(shape, device=device, dtype=dtype)
        for part in made:
            part.copy_(randn(generator, device, dtype, *shape[1:], scale=scale))
        return made
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    return drawn.mul_(scale).to(device=device, dtype=dtype)


def randint(
    generator: torch.Generator, device: torch.device, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    drawn = torch.randint(low, high, shape, generator=generator, device=generator.device)
    return drawn.to(device=device, dtype=dtype)


def rows_of(seqs: int, device: torch.device) -> torch.Tensor:
    """Rows of a table that sequences stand in, [sequences] int32: another than the sequence's own number, and never the
    first."""
    return torch.arange(seqs, 0, -1, dtype=torch.int32, device=device)


def row_table(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Sequences' values in the rows of `rows_of`, between two that belong to no sequence: [sequences + 2]."""
    return torch.tensor((values[-1], *reversed(values), values[0]), dtype=dtype, device=device)


def assert_close(name: str, got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> None:
    """Raises AssertionError unless shape and dtype are equal and both errors are within `tolerance`.

    Infinities have to stand in the same places; a NaN never passes.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    if tolerance == EXACT or not want.is_floating_point():
        wrong = got != want
        assert not wrong.any(), (
            f"{name}: {int(wrong.sum())} of {want.numel()} values differ, the first at {wrong.nonzero()[0].tolist()}"
        )
        return
    g, w = got.double(), want.double()
    assert not g.isnan().any(), f"{name}: {int(g.isnan().sum())} of {g.numel()} values are NaN"
    infinite = w.isinf()
    assert torch.equal(g.isinf(), infinite), f"{name}: infinities stand in other places"
    assert torch.equal(g[infinite], w[infinite]), f"{name}: infinities differ in sign"
    error, w = (g - w)[~infinite], w[~infinite]
    if not w.numel():
        return
    floor = torch.finfo(want.dtype).tiny
    max_rel = float(error.abs().max()) / max(float(w.abs().max()), floor)
    rms = float(error.square().mean().sqrt()) / max(float(w.square().mean().sqrt()), floor)
    assert max_rel <= tolerance.max_rel, (
        f"{name}: largest error {max_rel:.2e} of the largest magnitude, over {tolerance}"
    )
    assert rms <= tolerance.rms, f"{name}: RMS error {rms:.2e} of the RMS, over {tolerance}"


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that a call leaves unwritten shows: uninitialised tensors come full of NaN, or of a huge integer."""

    def fill(made: torch.Tensor) -> torch.Tensor:
        if made.is_floating_point():
            return made.fill_(float("nan"))
        return made.fill_(torch.iinfo(made.dtype).max) if made.dtype != torch.bool else made.fill_(True)

    def wrap(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: fill(make(*args, **kwargs))

    with (
        mock.patch.object(torch, "empty", wrap(torch.empty)),
        mock.patch.object(torch, "empty_like", wrap(torch.empty_like)),
        mock.patch.object(torch.Tensor, "new_empty", wrap(torch.Tensor.new_empty)),
    ):
        yield


def deterministic(cases: Sequence[Case], *names: str) -> list[Case]:
    """The cases of those names, asked for in batch-invariant arithmetic."""

    def asked(case: Case) -> Case:
        return replace(
            case,
            name=f"{case.name}, deterministic",
            make=lambda device, generator: {**case.make(device, generator), "deterministic": True},
        )

    return [asked(case) for name in names for case in cases if case.name == name]


def outputs(fn: Callable[..., Any], case: Case, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Calls `fn` and names all that it gave: returned tensors by place, then the arguments it writes into."""
    returned = fn(**inputs)
    if returned is None:
        returned = ()
    elif isinstance(returned, torch.Tensor):
        returned = (returned,)
    named = {f"output {i}": tensor for i, tensor in enumerate(returned)}
    return {**named, **{name: inputs[name] for name in case.mutated}}


def check(case: Case, kernel: Callable[..., Any], reference: Callable[..., Any], device: torch.device) -> None:
    """Runs both on equal inputs, the kernel into poisoned memory; raises AssertionError where they differ."""
    want = outputs(reference, case, case.make(device, seeded(device)))
    inputs = case.make(device, seeded(device))
    with poisoned():
        got = outputs(kernel, case, inputs)
    assert got.keys() == want.keys(), f"{case.name}: gives {list(got)}, expected {list(want)}"
    for name, tensor in want.items():
        assert_close(f"{case.name}, {name}", got[name], tensor, tolerance_of(case, tensor))
