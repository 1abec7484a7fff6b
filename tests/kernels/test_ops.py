"""Every op × case × implementation of the registry: kernels against references, references against plain formulas."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kernels.registry import Case, Op, registry
from kernels.table import README, filled
from kernels.testing import assert_close, bound, check, outputs, seeded, tolerance_of
from tests.kernels import formulas

ON_GPU = torch.cuda.is_available()
OPS = list(registry())
WHOLE = (torch.float32, torch.int32)


def _cases(op: Op) -> list[Case]:
    return [case for case in op.cases() if case.small or ON_GPU]


def _pairs(op: Op) -> Iterator[Any]:
    """Of each op's cases in either half precision the first; those that repeat others of a wider type are left to
    `make test-slow`."""
    cases = _cases(op)
    repeated = []
    for narrow, wide in ((torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        names = {case.name for case in cases if case.dtype is wide}
        repeated += [case for case in cases if case.dtype is narrow and case.name in names][1:]
    for case in cases:
        marks = [pytest.mark.slow] if any(case is one for one in repeated) else []
        # Experts of real sizes and scores of whole prompts come one after the other: several at once do not fit a GPU.
        if op.name in ("moe_gemm", "paged_attention") and not case.small:
            marks.append(pytest.mark.xdist_group("large"))
        yield pytest.param(op, case, id=f"{op.name}: {case.name} {str(case.dtype)[6:]}", marks=marks)


PAIRS = [pair for op in OPS for pair in _pairs(op)]


@pytest.mark.parametrize(("op", "case"), PAIRS)
def test_kernel_gives_what_the_reference_defines(op: Op, case: Case, device: torch.device) -> None:
    check(case, bound(op), op.reference, device)


@pytest.mark.parametrize(
    ("op", "case"), [pair for pair in PAIRS if pair.values[1].small and hasattr(formulas, pair.values[0].name)]
)
def test_reference_is_the_formula_in_float64(op: Op, case: Case) -> None:
    cpu = torch.device("cpu")
    formula: Callable[..., Any] = getattr(formulas, op.name)
    got = outputs(op.reference, case, case.make(cpu, seeded(cpu)))
    want = outputs(formula, case, case.make(cpu, seeded(cpu)))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        given = got[name]
        assert_close(f"{case.name}, {name}", given, tensor.to(given.dtype), tolerance_of(case, given))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_op_is_complete(op: Op) -> None:
    folder = f"kernels.{op.name}"
    for module in ("reference", "kernel", "cases"):
        assert importlib.import_module(f"{folder}.{module}").__doc__, f"{folder}.{module} has no docstring"
    assert op.kernel.__doc__
    assert op.reference.__doc__
    assert next(iter(inspect.signature(op.kernel).parameters)) == "workspace"
    assert inspect.signature(bound(op)) == inspect.signature(op.reference)
    names = [(case.name, case.dtype) for case in op.cases()]
    assert len(names) == len(set(names))
    assert all(case.bytes > 0 and case.flops >= 0 for case in op.cases() if not case.name.startswith("no tokens"))
    assert any(case.small for case in op.cases())
    assert set(op.cases()[0].mutated) <= set(inspect.signature(bound(op)).parameters)


def _wrong_value(op: Op) -> Callable[..., Any]:
    def broken(**inputs: Any) -> Any:
        given = bound(op)(**inputs)
        if given is None:
            made = inputs[op.cases()[0].mutated[0]]
        else:
            made = given if isinstance(given, torch.Tensor) else given[0]
        middle = tuple(size // 2 for size in made.shape)
        value = made[middle].double()  # 8-bit floats add nothing themselves
        made[middle] = (value + 1 + value.abs()).to(made.dtype)
        return given

    return broken


def _unwritten(op: Op) -> Callable[..., Any]:
    def broken(**inputs: Any) -> Any:
        given = bound(op)(**inputs)
        many = (given,) if isinstance(given, torch.Tensor) else given
        return tuple(torch.empty_like(tensor) for tensor in many)

    return broken


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_broken_kernel_is_caught(op: Op, device: torch.device) -> None:
    case = next(case for case in op.cases() if case.small and case.dtype in WHOLE and case.bytes)
    with pytest.raises(AssertionError):
        check(case, _wrong_value(op), op.reference, device)
    if op.reference.__annotations__["return"] != "None":
        with pytest.raises(AssertionError):
            check(case, _unwritten(op), op.reference, device)


@pytest.mark.parametrize("op", [op for op in OPS if op.cases()[0].mutated], ids=lambda op: op.name)
def test_kernel_that_leaves_its_argument_alone_is_caught(op: Op, device: torch.device) -> None:
    def broken(**inputs: Any) -> Any:
        return bound(op)(**{**inputs, **{name: inputs[name].clone() for name in op.cases()[0].mutated}})

    case = next(case for case in op.cases() if case.small and case.dtype in WHOLE and case.bytes)
    with pytest.raises(AssertionError):
        check(case, broken, op.reference, device)


def test_readme_lists_the_registry() -> None:
    text = README.read_text(encoding="utf-8")
    assert filled(text) == text, "kernels/README.md is behind: python -m kernels.table"
