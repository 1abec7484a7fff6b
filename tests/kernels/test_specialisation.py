"""Triton compiles a kernel again for an integer that becomes 1 or a multiple of 16, and for a pointer that is no longer
on 16 bytes. While an engine serves, the number of sequences and tokens changes from step to step, and a compilation
stalls every stream for a second: what varies must not be specialised on.

Held for every op: over steps of many sizes of one model, launches of a kernel with the same constants ask for one
compilation, and there are few sets of constants. On a GPU the compiler's own caches are counted as well.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch

from kernels.registry import OPS, Op
from kernels.testing import bound, outputs, seeded
from tests.kernels.sizes import COUNTS, Step, steps

STEPS = steps()
# Tiles chosen by the number of tokens or sequences, at most, of a kernel in one kind of step.
MAX_TILES = 6

Constants = tuple[Any, ...]
Traits = tuple[tuple[str, str], ...]


class Launches:
    """What each launch of a kernel would be compiled for: its constants, and the traits of its other arguments."""

    def __init__(self) -> None:
        self.seen: dict[Any, dict[Constants, set[Traits]]] = defaultdict(lambda: defaultdict(set))

    def note(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(kernel.fn)
        options = {k: v for k, v in kwargs.items() if k not in signature.parameters}
        given = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
        given.apply_defaults()
        loose, unaligned = _not_specialised(kernel)
        constants: list[Any] = [(name, str(value)) for name, value in sorted(options.items()) if name != "stream"]
        traits = []
        for i, (name, value) in enumerate(given.arguments.items()):
            if "constexpr" in str(signature.parameters[name].annotation) or value is None:
                constants.append((name, str(value)))
            elif name not in loose and i not in loose:
                aligned_only = name in unaligned or i in unaligned
                traits.append((name, trait(value, aligned_only)))
        self.seen[kernel][tuple(constants)].add(tuple(traits))


def _not_specialised(kernel: Any) -> tuple[set[Any], set[Any]]:
    """Names or places of the arguments that a kernel declares as varying, and of pointers of any alignment."""
    if hasattr(kernel, "params"):
        loose = {p.name for p in kernel.params if p.do_not_specialize}
        return loose, {p.name for p in kernel.params if p.do_not_specialize_on_alignment}
    said = kernel.kwargs
    return set(said.get("do_not_specialize") or ()), set(said.get("do_not_specialize_on_alignment") or ())


def trait(value: Any, any_alignment: bool = False) -> str:
    """What Triton's JIT compiles in of an argument that is not a constant."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype) + (" on 16" if not any_alignment and value.data_ptr() % 16 == 0 else "")
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    width = "int32" if -(2**31) <= value < 2**31 else "int64"
    return f"{width} 1" if value == 1 else f"{width} of 16" if value % 16 == 0 and not any_alignment else width


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> Launches:
    """Notes launches: under the interpreter instead of running them, on a GPU before it does."""
    made = Launches()
    if device.type == "cuda":
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def noted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            made.note(self, args, kwargs)
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)

        monkeypatch.setattr(JITFunction, "run", noted)
    else:
        from triton.runtime.interpreter import InterpretedFunction

        def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            made.note(self, args, kwargs)

        monkeypatch.setattr(InterpretedFunction, "run", note)
        # What is launched is what an H200 would be given: on the few processors of a CPU other sizes are split.
        assert all(Op(name).kernel for name in OPS), "imported, so that all have the number to be exchanged"
        for name, module in list(sys.modules.items()):
            if name.startswith("kernels.") and hasattr(module, "multiprocessors"):
                monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    return made


def run(op: Op, step: Step, device: torch.device) -> None:
    for count in COUNTS:
        case = step(count)
        outputs(bound(op), case, case.make(device, seeded(device)))


def problems(launches: Launches) -> list[str]:
    """A sentence for each kernel that compiles again for what varies."""
    found = []
    for kernel, by_constants in launches.seen.items():
        if len(by_constants) > MAX_TILES:
            found.append(f"{kernel.__name__} has {len(by_constants)} sets of constants over {len(COUNTS)} sizes")
        for many in by_constants.values():
            varied = [set(column) for column in zip(*many, strict=True)]
            found += [
                f"{kernel.__name__} is compiled again for its argument {name}: {sorted(kinds)}"
                for name, kinds in ((next(iter(c))[0], {kind for _, kind in c}) for c in varied)
                if len(kinds) > 1
            ]
    return sorted(set(found))


def test_every_op_is_here() -> None:
    assert set(STEPS) == set(OPS)


@pytest.mark.parametrize(
    ("name", "step"),
    [pytest.param(op, step, id=f"{op}: {kind}") for op, kinds in STEPS.items() for kind, step in kinds.items()],
)
def test_no_kernel_is_compiled_again_for_what_varies(
    name: str, step: Step, launches: Launches, device: torch.device
) -> None:
    op = Op(name)
    run(op, step, device)
    assert not problems(launches)
    if device.type == "cuda":
        caches = {kernel: _compiled(kernel, device) for kernel in launches.seen}
        assert launches.seen or name == "linear"
        run(op, step, device)
        assert {kernel: _compiled(kernel, device) for kernel in launches.seen} == caches
    else:
        assert launches.seen, "no launch was seen"


def _compiled(kernel: Any, device: torch.device) -> int:
    """How many compilations of a kernel the process holds."""
    return len(kernel.device_caches[device.index or 0][0])


def test_a_kernel_that_specialises_on_a_varying_number_is_caught(launches: Launches, device: torch.device) -> None:
    import triton
    import triton.language as tl

    def double(p_x, p_y, total, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_y + at, 2 * tl.load(p_x + at, mask=at < total, other=0.0), mask=at < total)

    def sweep(kernel: Any, start: int = 0) -> list[str]:
        launches.seen.clear()
        for count in COUNTS:
            x = torch.zeros(count + 4, device=device)[start : start + count]
            kernel[(triton.cdiv(count, 64),)](x, torch.empty_like(x), count, BLOCK=64)
        return problems(launches)

    assert any("argument total" in problem for problem in sweep(triton.jit(double)))
    assert not sweep(triton.jit(double, do_not_specialize=["total"]))
