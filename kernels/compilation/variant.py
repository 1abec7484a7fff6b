"""A kernel together with all that its machine code depends on: as bytes for another process, and compiled there.

Compiling needs no GPU, as long as the target is named. What it makes stands in Triton's cache on disk.
"""

from __future__ import annotations

import importlib
import inspect
import io
import pickle
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from typing import Any

import triton
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import JITCallable, JITFunction


@dataclass(frozen=True, slots=True)
class Variant:
    """What Triton compiles for one launch; fields but `target` are those of its own source and options."""

    function: JITFunction[Any]
    signature: dict[str, Any]
    constexprs: dict[Any, Any]
    attrs: dict[Any, Any]
    options: dict[str, Any]
    target: GPUTarget

    def to_bytes(self) -> bytes:
        """Raises pickle.PicklingError when another process could not find the function by its name, and what pickle
        raises when a value cannot be written down."""
        out = io.BytesIO()
        values = (self.function, self.signature, self.constexprs, self.attrs, self.options, self.target)
        _Pickler(out, protocol=pickle.HIGHEST_PROTOCOL).dump(values)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Variant:
        variant = cls(*pickle.loads(data))
        hash_functions(variant.function.fn.__module__)
        return variant

    def compile(self) -> None:
        """Put the machine code, and the C function that launches it, into Triton's cache."""
        source_type = GluonASTSource if self.function.is_gluon() else ASTSource
        source = source_type(self.function, self.signature, self.constexprs, self.attrs)
        kernel = triton.compile(source, target=self.target, options=self.options)
        # Triton 3.6 compiles a C function for each kind of signature; later ones have one for all.
        with suppress(Exception):  # it can be made by the process that launches
            _driver(self.target).launcher_cls(source, kernel.metadata)


class CompileFirst(triton.AsyncCompileMode):
    """Has variants compiled elsewhere before they are compiled here, which then only reads them from Triton's cache.
    What could not be compiled elsewhere is compiled here.
    """

    def __init__(self, executor: Executor, elsewhere: Callable[[bytes], bool] | None) -> None:
        super().__init__(executor)
        self._elsewhere = elsewhere

    def submit(self, key: str, compile_fn: Any, *rest: Any) -> Any:
        return super().submit(key, partial(self._compile, key, _variant(compile_fn), compile_fn), *rest)

    def _compile(self, key: str, variant: Variant | None, compile_fn: Any) -> Any:
        if self._elsewhere is not None and variant is not None and not _cached(key, variant.function.__name__):
            with suppress(pickle.PicklingError, AttributeError, TypeError):  # what cannot be written down
                self._elsewhere(variant.to_bytes())
        return compile_fn()


def _variant(compile_fn: Any) -> Variant | None:
    """What Triton is about to compile, which its function holds: None for another function than that of
    `JITFunction._do_compile` of triton 3.6 to 3.9."""
    held = inspect.getclosurevars(compile_fn).nonlocals
    source, target, options = (held.get(name) for name in ("src", "target", "options"))
    if source is None or target is None or options is None:
        return None
    return Variant(source.fn, source.signature, source.constants, source.attrs, options.__dict__, target)


def prepare() -> None:
    """Do once in a process what every compilation of it needs: the hash over Triton's own files, and its driver's
    library. No CUDA context is made."""
    triton_key()
    with suppress(Exception):  # without it, the C functions that launch kernels are made by those who need them
        backends["nvidia"].driver()


@cache
def hash_functions(module: str) -> None:
    """Have Triton hash the functions of a module, those that they call first. Hashes name files of its cache, and come
    out differently when a function was hashed before one that it calls (Triton 3.6 then leaves the constants of
    the inner one out): another process, or the next start, would look for another file."""
    found = [value for value in vars(importlib.import_module(module)).values() if isinstance(value, JITCallable)]
    for function in found:
        if function.fn.__module__ != module:
            hash_functions(function.fn.__module__)
    for function in found:
        _ = function.cache_key


def _driver(target: GPUTarget) -> Any:
    """The driver's side of Triton for a target, without asking whether this machine has such a device."""
    return next(backend for backend in backends.values() if backend.compiler.supports_target(target)).driver()


def _cached(key: str, name: str) -> bool:
    """Whether Triton's cache has machine code under this key. The names are Triton's (`triton.compiler.compile`)."""
    folder = get_cache_manager(sha256(key.encode("utf-8")).hexdigest())
    return bool(folder.get_group(f"{name[:150]}.json"))


class _Pickler(pickle.Pickler):
    """Writes a kernel down as the place it is found at."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, JITFunction):
            return NotImplemented
        module, name = value.fn.__module__, value.fn.__name__
        if getattr(importlib.import_module(module), name, None) is not value:
            raise pickle.PicklingError(f"kernel {name} is not found in {module}")
        return _found, (module, name)


def _found(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
