"""Kernels compiled before serving starts, many at once: every variant that an engine's steps can need.

A kernel that is compiled while requests run holds all of them up, for seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kernels.workspace import Workspace

# Compiles a `kernels.compilation.variant.Variant`, given as bytes, into Triton's cache, and says whether it did.
Elsewhere = Callable[[bytes], bool]


class Compiler:
    """Compiles kernels, `threads` at once: those that are launched within `only`, while the caller goes on. Leaving
    it waits for all of them and loads them.

    `elsewhere` compiles in other processes; without it, or where it fails, threads of this one do.

    with Compiler(16) as compiler:
        with compiler.only(workspace):
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
        from kernels.compilation.variant import CompileFirst

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
    def only(self, workspace: Workspace) -> Iterator[None]:
        """Within, the workspace's launches compile and do not run. What kernels would have written is zero, so that
        torch's own operations between them stay in bounds. Other engines of the process launch as ever."""
        with workspace.launched_by(self._compile), Zeroed():
            yield

    def _compile(self, function: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        from kernels.compilation.variant import hash_functions

        hash_functions(function.fn.__module__)
        kernel = function.run(*args, grid=grid, warmup=True, **options)
        self._made[id(kernel)] = kernel
        # Triton looks a kernel up in full until somebody has asked for its result.
        future = getattr(kernel, "future", None)
        if future is not None and future.done():
            kernel.result()


class Zeroed(TorchFunctionMode):
    """Within, memory from torch comes full of zeros instead of what stood there. For the thread that enters it."""

    _makers = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._makers else made
