"""Walks one call of an op for a GPU that need not be there, and says what was decided on the way."""

from __future__ import annotations

from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.compile_all.tensors import CUDA, inputs, without_memory
from kernels.dispatch import Choice, Dispatch
from kernels.explain.dispatches import DISPATCHES
from kernels.hardware import Gpu, described
from kernels.linear.dispatch import Problem
from kernels.linear.tuned_gemms import measured
from kernels.registry import Case, Op
from kernels.workspace import Workspace

_INDENT = " " * 20


def explain(op: str, case: Case, gpu: Gpu) -> str:
    """What the op's launcher decides for the case, one paragraph a decision, and what it launches.

    Raises NeedsValues for a case that is cut by values of large tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given, launched = inputs(case, mode), []

    def note(kernel: Any, grid: tuple[int, ...], *_: Any, **__: Any) -> None:
        launched.append(f"{kernel.fn.__name__}[{', '.join(map(str, grid))}]")

    for dispatch in DISPATCHES.values():
        dispatch.forget()
    with described(gpu):
        workspace = Workspace(CUDA, tuned_gemms=False)
        with without_memory(mode), workspace.launched_by(note):
            Op(op).kernel(workspace, **given)
    made = [
        _paragraph(title, dispatch, problem, choice)
        for title, dispatch in DISPATCHES.items()
        for problem, choice in dispatch.decided().items()
    ]
    return "\n\n".join([*made, f"launches: {', '.join(launched) or 'none, it is the library that multiplies'}"])


def _paragraph(title: str, dispatch: Dispatch[Any], problem: Any, chosen: Choice) -> str:
    """A line for the problem and one for each variant, in the order in which they are asked."""
    facts = ", ".join(f"{name}={value}" for name, value in problem._asdict().items())
    printed, won = [f"{title}: {facts}"], False
    for variant, why in dispatch.refusals(problem):
        if why is not None:
            said = f"declines: {why}"
        elif won:
            said = "would take it, and stands behind the winner"
        else:
            won = True
            said = f"runs, with {chosen.config}" if chosen.config is not None else "runs"
            said += f"\n{_INDENT}measured: {variant.evidence}"
            if isinstance(problem, Problem) and variant.name == "library":
                outputs = problem.outputs * (2 if problem.activation else 1)
                said += f"\n{_INDENT}{measured(problem.table, outputs, problem.inputs, problem.rows)}"
        printed.append(f"  {variant.name:<18}{said}")
    return "\n".join(printed)
