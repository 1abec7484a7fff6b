"""Compilation of kernels: many at once before serving starts, and a watch on those that come later.

A kernel that is compiled while requests run holds all of them up, for seconds. So the engine compiles every variant
that its steps can need ahead (`Compiler`), and counts what comes later all the same (`CompileWatch`).
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

log = logging.getLogger(__name__)

# Compiles a `kernels.variants.Variant`, given as bytes, into Triton's cache, and says whether it did.
Elsewhere = Callable[[bytes], bool]


class CompileWatch:
    """Counts the kernels that this process compiles, or loads from Triton's cache on disk, once `arm` was called.

    One a process: Triton has one listener. `late` counts by name; a name is logged the first time.
    """

    def __init__(self) -> None:
        self.late: Counter[str] = Counter()
        self._armed = False

    @property
    def count(self) -> int:
        return sum(self.late.values())

    def install(self) -> CompileWatch:
        """Be told of every compilation of this process."""
        import triton

        triton.knobs.compilation.listener = self._heard
        return self

    def arm(self) -> None:
        """Serving starts: what comes from now on is late."""
        self._armed = True

    def _heard(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if not self._armed:
            return
        name = str(src.name)
        if name not in self.late:
            log.warning(
                "kernel %s was %s while the engine serves (%.0f ms): its steps were held up. Kernels should be ready "
                "by then; please report the model and its settings",
                name,
                "loaded from the disk cache" if cache_hit else "compiled",
                times.total / 1e3,
            )
        self.late[name] += 1


class Compiler:
    """Compiles kernels, `threads` at once: those that are launched within `only`, while the caller goes on. Leaving
    it waits for all of them and loads them.

    `elsewhere` compiles in other processes; without it, or where it fails, threads of this one do.

    with Compiler(16) as compiler:
        with compiler.only():
            ...launches
        ...something else

    Raises what a compilation raised.
    """

    def __init__(self, threads: int, elsewhere: Elsewhere | None = None) -> None:
        self._threads = threads
        self._elsewhere = elsewhere
        self._made: dict[int, Any] = {}
        self._open = ExitStack()

    def __enter__(self) -> Compiler:
        from kernels.variants import CompileFirst

        pool = self._open.enter_context(ThreadPoolExecutor(self._threads))
        self._mode = self._open.enter_context(CompileFirst(pool, self._elsewhere))
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)
        for kernel in self._made.values():
            # Reading `run` loads the machine code, which the first launch would do.
            (kernel.result() if hasattr(kernel, "result") else kernel).run  # noqa: B018
        self._made.clear()

    @contextmanager
    def only(self) -> Iterator[None]:
        """Within, launches compile and do not run. What kernels would have written is zero, so that torch's own
        operations between them stay in bounds."""
        from triton.runtime.jit import JITFunction

        run, do_compile = JITFunction.run, JITFunction._do_compile
        taken = inspect.signature(do_compile)

        def do_compile_it(function: Any, *args: Any, **kwargs: Any) -> Any:
            with self._mode.submitting(function, taken.bind(function, *args, **kwargs).arguments):
                return do_compile(function, *args, **kwargs)

        def compile_it(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            kernel = run(function, *args, grid=grid, warmup=True, **options)
            self._made[id(kernel)] = kernel
            # Triton looks a kernel up in full until somebody has asked for its result.
            future = getattr(kernel, "future", None)
            if future is not None and future.done():
                kernel.result()
            return kernel

        with (
            mock.patch.object(JITFunction, "run", compile_it),
            mock.patch.object(JITFunction, "_do_compile", do_compile_it),
            zeroed(),
        ):
            yield


@contextmanager
def zeroed() -> Iterator[None]:
    """Memory from torch comes full of zeros instead of what stood there."""

    def wrap(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *args, **kwargs: make(*args, **kwargs).zero_()

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        yield
