"""Where kernels run in these tests: compiled on a GPU when there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


def _complete_casts(patch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bare uint16: it multiplies those as integers and truncates when it casts. Where
    rounding to 8-bit floats carries over into the exponent, it loses the carry."""
    from triton import language as tl
    from triton.runtime import interpreter

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


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _memory_for_all(device: torch.device) -> Iterator[None]:
    """Several processes of tests share a GPU, and references of real shapes take gigabytes: none keeps what it had."""
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="package", autouse=True)
def _where_kernels_run(device: torch.device) -> Iterator[None]:
    """Kernels are bound to the interpreter when their module is first imported, so the ops import them lazily."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            patch.setenv("TRITON_INTERPRET", "1")
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            _complete_casts(patch)
            yield
            torch.set_num_threads(threads)
        else:
            yield
