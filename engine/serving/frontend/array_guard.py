"""Input tensors whose shape overflows end no process.

tritonserver 2.51 multiplies a shape without a look at overflow: [2^62] of INT32 has 2^64 bytes, which is 0, so it
fits a message without content. The Python backend's stub then has numpy make an array of that shape, numpy refuses, and
the stub ends, before any code of ours runs and with every stream of the instance. So numpy's function is wrapped in the
table of its C API that the stub calls it by: a shape that cannot be gives an array without elements, which is refused
as such. Two microseconds an array.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import numpy as np

_PLACE = 94  # of PyArray_NewFromDescr: numpy/__multiarray_api.h, a part of numpy's ABI
_MOST = 2**60  # elements: with eight bytes each, all of the address space
# PyObject *PyArray_NewFromDescr(type, descr, nd, dims, strides, data, flags, obj), called with the interpreter's lock
_SIGNATURE = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_void_p,
)
_EMPTY = (ctypes.c_int64 * 1)(0)


class ArrayGuard:
    """Wraps the function from `install` to `remove`. Keep it: the table points into it."""

    def __init__(self) -> None:
        core = "numpy.core" if np.__version__.startswith("1.") else "numpy._core"
        capsule = importlib.import_module(f"{core}.multiarray")._ARRAY_API
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        self._table = ctypes.cast(get_pointer(capsule, None), ctypes.POINTER(ctypes.c_void_p))
        self._address = self._table[_PLACE]
        original = _SIGNATURE(self._address)

        def new_from_descr(
            kind: Any, descr: Any, nd: int, dims: Any, strides: Any, data: Any, flags: int, obj: Any
        ) -> Any:
            count = 1
            for size in dims[:nd]:
                count *= size or 1 if size >= 0 else _MOST + 1  # numpy leaves zeros out of its own check
            if count > _MOST:
                nd, dims, strides = 1, _EMPTY, None
            return original(kind, descr, nd, dims, strides, data, flags, obj)

        self._wrapped = _SIGNATURE(new_from_descr)

    def install(self) -> ArrayGuard:
        self._table[_PLACE] = ctypes.cast(self._wrapped, ctypes.c_void_p).value
        return self

    def remove(self) -> None:
        self._table[_PLACE] = self._address
