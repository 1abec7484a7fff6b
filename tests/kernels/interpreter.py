"""Triton's interpreter as these tests use it: numbers cast as a GPU casts them, and its own work done once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter


def complete_casts(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bare uint16: it multiplies those as integers and truncates when it casts. Where
    rounding to 8-bit floats carries over into the exponent, it loses the carry."""
    builder = interpreter.InterpreterBuilder
    dot, cast, convert = builder.create_dot, builder.cast_impl, interpreter._convert_float

    def upcast(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, upcast(a), upcast(b), *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return interpreter.TensorHandle(rounded.numpy().view(np.uint16).reshape(source.data.shape), tl.bfloat16)

    def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) != (tl.float32, tl.float8e4nv):
            return convert(values, source, target, rounding)
        wide = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
        numbers: np.ndarray = wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return numbers.reshape(values.shape)

    patch.setattr(interpreter, "_convert_float", convert_float)
    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "cast_impl", cast_impl)


@contextmanager
def language_bound_once() -> Iterator[None]:
    """The interpreter puts its own functions into triton.language before each launch and each call of a device
    function, for which it looks through four namespaces, and makes a table of dtypes for each it looks up. Within,
    they are in place from the start to the end, and a dtype is looked up once."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    in_place = interpreter._LangPatchScope()
    numbers: dict[str, np.dtype[Any]] = {}
    made = interpreter._get_np_dtype

    def dtype_of(kind: Any) -> np.dtype[Any]:
        name = kind.scalar.name
        if name not in numbers:
            numbers[name] = made(kind)
        return numbers[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_get_np_dtype", dtype_of)
        patch.setattr(interpreter, "_patch_lang", lambda fn: in_place)
        make_types_once(patch)
        # Sums and products of integers are computed again in 64 bits for an assertion that only options.debug turns on.
        options = interpreter.interpreter_builder.options
        patch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))
        yield
    scope.restore()


def make_types_once(patch: pytest.MonkeyPatch) -> None:
    """Each value of a program has a type, and each type a shape of wrapped numbers: of few kinds, made millions of
    times. Equal types share their shapes, and operands of one shape are not broadcast."""
    semantic = interpreter.interpreter_semantic
    broadcast = semantic.broadcast_impl_value
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, tuple[Any, Any]] = {}
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            make_tensor(self, handle, type)
            shapes[type.name] = (self.shape, self.numel)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[type.name]

    def broadcast_impl_value(left: Any, right: Any) -> tuple[Any, Any]:
        if left.shape is right.shape:
            return left, right
        return broadcast(left, right)

    patch.setattr(tl.block_type, "__init__", block)
    patch.setattr(tl.tensor, "__init__", tensor)
    patch.setattr(semantic, "broadcast_impl_value", broadcast_impl_value)


def sum_in_turn(patch: pytest.MonkeyPatch) -> None:
    """Products add up their inputs one by one, as one accumulator would: numpy's order goes by the sides of both."""

    def matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
        a, b = a.astype(dtype), b.astype(dtype)
        total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
        product = np.empty_like(total)
        for k in range(a.shape[-1]):
            total += np.multiply(a[..., :, k, None], b[..., None, k, :], out=product)
        return total

    patch.setattr(np, "matmul", matmul)
