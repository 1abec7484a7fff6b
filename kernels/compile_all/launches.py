"""Walks an op's cases for one GPU: what its launcher would launch is compiled."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.compiler.errors import CompilationError
from triton.runtime.jit import MockTensor

from kernels.compilation.variant import hash_functions
from kernels.compile_all.targets import Target, compiling_for
from kernels.compile_all.tensors import CUDA, NeedsValues, address, inputs, without_memory
from kernels.hardware import FP8_CAPABILITY
from kernels.registry import Case
from kernels.workspace import Workspace

# What Triton says of 8-bit floats where the GPU does not convert them, and what the engine does there.
_FP8_MISSING = "type fp8e4nv not supported in this architecture"
FP8_REFUSED = "8-bit floats: the engine refuses such weights and caches on a GPU before sm_89"


class Walked(Protocol):
    """Of `kernels.registry.Op`, what is walked."""

    @property
    def name(self) -> str: ...

    @property
    def kernel(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Failure:
    """case: its name and dtype. kernel: the jitted function, or the launcher where that failed. reason: a sentence."""

    op: str
    arch: int
    case: str
    kernel: str
    reason: str


@dataclass(slots=True)
class Report:
    """Of some cases of one op for one GPU. variants: machine codes, each counted once. left_out: case to sentence."""

    op: str
    arch: int
    cases: int = 0
    variants: set[str] = field(default_factory=set)
    failures: list[Failure] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, other: Report) -> None:
        self.cases += other.cases
        self.variants |= other.variants
        self.failures += other.failures
        self.left_out |= other.left_out

    def reasons(self) -> Counter[tuple[str, str]]:
        """How many cases failed at each kernel for each reason."""
        return Counter((failure.kernel, failure.reason) for failure in self.failures)


def walk(op: Walked, cases: Iterable[Case], target: Target) -> Report:
    """Compiles what the op launches for each case. A launch that fails does not keep the case's others from being
    compiled. Products that a library multiplies are not launches; tuned GEMMs are off."""
    report = Report(op.name, target.arch)
    with compiling_for(target):
        for case in cases:
            report.cases += 1
            _Case(op, case, target, report).walk()
    return report


def title(case: Case) -> str:
    return f"{case.name} {str(case.dtype).removeprefix('torch.')}"


class _Case:
    """One case under way."""

    def __init__(self, op: Walked, case: Case, target: Target, report: Report) -> None:
        self._op, self._case, self._target, self._report = op, case, target, report

    def walk(self) -> None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            given = inputs(self._case, mode)
        except NeedsValues as problem:
            self._report.left_out[title(self._case)] = str(problem)
            return
        workspace = Workspace(CUDA, tuned_gemms=False)
        try:
            with without_memory(mode), workspace.launched_by(self._launch):
                self._op.kernel(workspace, **given)
        except Exception as error:
            self._fail("launcher", error)

    def _launch(self, kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """In the place of a launch."""
        name = kernel.fn.__name__
        hash_functions(kernel.fn.__module__)
        try:
            made = kernel.run(
                *map(_stand_in, args),
                grid=grid,
                warmup=True,
                **{key: _stand_in(value) for key, value in options.items()},
            )
        except Exception as error:
            self._fail(name, error)
            return
        self._report.variants.add(made.hash)
        self._check(name, "shared memory", "bytes", made.metadata.shared, self._target.shared_bytes)
        columns = getattr(made.metadata, "tmem_size", None) or 0
        self._check(name, "tensor memory", "columns", columns, self._target.tensor_memory)

    def _check(self, kernel: str, what: str, unit: str, asked: int, limit: int) -> None:
        if asked > limit:
            self._add(kernel, f"needs {asked} {unit} of {what}; a block has {limit} on sm_{self._target.arch}")

    def _fail(self, kernel: str, error: BaseException) -> None:
        reason = _sentence(error)
        if _FP8_MISSING in reason and self._target.capability < FP8_CAPABILITY:
            self._report.left_out[title(self._case)] = FP8_REFUSED
        else:
            self._add(kernel, reason)

    def _add(self, kernel: str, reason: str) -> None:
        self._report.failures.append(
            Failure(self._op.name, self._target.arch, title(self._case), kernel, reason),
        )


def _sentence(error: BaseException) -> str:
    """The innermost cause and its place. Triton quotes the source around its message, whose last line says what."""
    place = ""
    while True:
        if isinstance(error, CompilationError):
            name = re.search(r"def (\w+)", error.src or "")
            line = getattr(error.node, "lineno", None)
            place = f" (in {name.group(1)}, its line {line})" if name and line else place
        if error.__cause__ is None:
            break
        error = error.__cause__
    text = [part.strip() for part in str(error).splitlines() if part.strip()]
    return f"{type(error).__name__}: {text[-1] if text else 'no message'}{place}"


class _Pointer(MockTensor):
    """What Triton asks of a tensor: dtype and alignment."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype, list(tensor.shape))
        self._address = address(tensor)

    def data_ptr(self) -> int:
        return self._address


def _stand_in(value: Any) -> Any:
    """A launch's argument without torch's tensors: pointers and descriptions of them."""
    if isinstance(value, torch.Tensor):
        return _Pointer(value)
    if isinstance(getattr(value, "base", None), torch.Tensor):
        made = object.__new__(type(value))
        made.__dict__.update(vars(value), base=_Pointer(value.base))
        return made
    if isinstance(value, tuple):
        return tuple(map(_stand_in, value))
    return value
