"""cublasLt, the library behind torch's products, with an algorithm of one's own choice.

torch takes the first answer of the library's heuristic. Here an algorithm is named by its configuration, checked by the
library for the product at hand, and launched with a workspace of ours. Sums are accumulated in float32, parts of a
split sum too, and added up in a fixed order: the same product gives the same bits.

A matrix of torch, rows one after another, is its transpose to cublasLt, which stores columns: y = x @ weightᵀ is asked
for as yᵀ [N, T] = weight [N, K] @ xᵀ [K, T]. 8-bit floats come with scales, which the library multiplies by.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch

log = logging.getLogger(__name__)

WORKSPACE = 32 << 20
ALIGNMENT = 16

# cublasLt.h, cublas_api.h and library_types.h; these numbers are the library's binary interface.
_TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float8_e4m3fn: 28}
_FLOAT, _COMPUTE_FLOAT = 0, 68
_DESC_TRANSA, _TRANSPOSED = 3, 1
_DESC_FAST = 25
# A is the weight, B is x.
_SCALE_POINTERS, _SCALE_MODES = (17, 18), (31, 32)
# Modes of A and of B: a scale for each row of both; one for 128 by 128 numbers, and for 128 inputs of a row.
_SCALES = {"rows": (3, 3), "blocks": (5, 4)}
_PREFER_WORKSPACE, _PREFER_REDUCTIONS = 1, 3
_PREFER_ALIGNMENTS = (5, 6, 7, 8)
_ALGO_ID = 0
# Algorithm's fields after `id`, in their order
_CONFIG = (
    *((1, c_uint32), (6, c_uint32), (8, c_uint16), (7, c_uint16)),
    *((2, c_int32), (3, c_uint32), (4, c_uint32), (5, c_uint32)),
)
REDUCE_IN_FLOAT = 2


@dataclass(frozen=True, slots=True)
class Algorithm:
    """An algorithm by its configuration, in cublasLt's own numbers (CUBLASLT_ALGO_CONFIG_*)."""

    id: int
    tile: int
    stages: int = 0
    cluster: int = 0
    inner: int = 0
    split: int = 1
    reduction: int = 0
    swizzle: int = 0
    custom: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """x [rows, inputs], whose rows lie `stride` elements apart, times weight [outputs, inputs] transposed.

    dtype: of both. scales: both are 8-bit floats, and have scales by rows, or by blocks of 128 by 128 and groups of
    128 inputs; the result is bfloat16 then, else of `dtype`. fast: sums of 8-bit floats stay in the tensor cores, which
    keep 14 bits or so of them (DeepSeek-V3, arXiv:2412.19437, section 3.3.2); else they are added up in float32.
    """

    rows: int
    inputs: int
    outputs: int
    stride: int
    dtype: torch.dtype = torch.bfloat16
    scales: Literal["rows", "blocks"] | None = None
    fast: bool = False

    @property
    def result(self) -> torch.dtype:
        return self.dtype if self.scales is None else torch.bfloat16


class Refused(ValueError):
    """The library does not take this algorithm for this product."""


class _Layout(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Preference(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Algo(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Desc(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 32)]


class _Result(ctypes.Structure):
    _fields_ = [("algo", _Algo), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)]


@dataclass(frozen=True, slots=True)
class Plan:
    """A product with an algorithm that the library has taken: what its launch needs."""

    algorithm: Algorithm
    workspace: int
    waves: float
    desc: _Desc
    layouts: tuple[_Layout, _Layout, _Layout]
    algo: _Algo


class Blas:
    """The cublasLt that torch has loaded, on one device. One stream at a time, as there is one workspace.

    Raises OSError when it is not to be found.
    """

    def __init__(self, device: torch.device) -> None:
        # The soname finds what torch has loaded. Launches take microseconds: they keep the interpreter.
        self._lib = ctypes.PyDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")
        self._lib.cublasLtGetVersion.restype = c_size_t
        self.version = int(self._lib.cublasLtGetVersion())
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._handle = c_void_p()
        self._call("Create", byref(self._handle))
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._matmul = self._lib.cublasLtMatmul
        self._matmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]

    def heuristic(self, product: Product, count: int, workspace: int = WORKSPACE) -> list[Plan]:
        """The library's own answers, best first as it thinks."""
        desc, layouts = self._described(product)
        preference = _Preference()
        self._call("MatmulPreferenceInit_internal", byref(preference), c_size_t(sizeof(preference)))
        asked: list[tuple[int, Any]] = [
            (_PREFER_WORKSPACE, c_uint64(workspace)),
            (_PREFER_REDUCTIONS, c_uint32(REDUCE_IN_FLOAT)),
            *((attribute, c_uint32(ALIGNMENT)) for attribute in _PREFER_ALIGNMENTS),
        ]
        for attribute, value in asked:
            self._call("MatmulPreferenceSetAttribute", byref(preference), attribute, byref(value), _size(value))
        results, found = (_Result * count)(), c_int()
        w, x, y = map(byref, layouts)
        self._call(
            "MatmulAlgoGetHeuristic",
            *(self._handle, byref(desc), w, x, y, y, byref(preference), count, results, byref(found)),
        )
        return [
            Plan(_configuration(self._lib, r.algo), r.workspace, r.waves, desc, layouts, _Algo.from_buffer_copy(r.algo))
            for r in results[: found.value]
            if r.state == 0
        ]

    def plan(self, product: Product, algorithm: Algorithm) -> Plan:
        """Raises Refused when the library does not take it, or wants more workspace than there is."""
        desc, layouts = self._described(product)
        kind, result_kind, algo = _TYPES[product.dtype], _TYPES[product.result], _Algo()
        try:
            self._call(
                "MatmulAlgoInit",
                *(
                    self._handle,
                    _COMPUTE_FLOAT,
                    _FLOAT,
                    kind,
                    kind,
                    result_kind,
                    result_kind,
                    algorithm.id,
                    byref(algo),
                ),
            )
            for (attribute, width), value in zip(_CONFIG, astuple(algorithm)[1:], strict=True):
                held = width(value)
                self._call("MatmulAlgoConfigSetAttribute", byref(algo), attribute, byref(held), _size(held))
            result = _Result()
            w, x, y = map(byref, layouts)
            self._call("MatmulAlgoCheck", self._handle, byref(desc), w, x, y, y, byref(algo), byref(result))
        except RuntimeError as problem:
            raise Refused(f"{algorithm} for {product}: {problem}") from None
        if result.workspace > WORKSPACE:
            raise Refused(f"{algorithm} for {product}: {result.workspace} bytes of workspace")
        return Plan(algorithm, result.workspace, result.waves, desc, layouts, algo)

    def multiply(
        self,
        plan: Plan,
        x: torch.Tensor,
        weight: torch.Tensor,
        residual: torch.Tensor | None,
        y: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """y = x @ weightᵀ, plus residual; y may be the residual. Both are contiguous, all of the plan's sizes. scales:
        the weight's and x's, of a product that has some.

        Raises RuntimeError with the library's status when it refuses.
        """
        w, rows, columns = plan.layouts
        if scales is not None:
            self._point_to_scales(plan.desc, *(held.data_ptr() for held in scales))
        status = self._matmul(
            *(self._handle, byref(plan.desc), byref(self._one), weight.data_ptr(), byref(w), x.data_ptr(), byref(rows)),
            byref(self._zero if residual is None else self._one),
            *((y if residual is None else residual).data_ptr(), byref(columns), y.data_ptr(), byref(columns)),
            *(byref(plan.algo), self._workspace.data_ptr(), WORKSPACE, torch.cuda.current_stream().cuda_stream),
        )
        if status:
            raise RuntimeError(f"cublasLtMatmul gave status {status} for {plan.algorithm}")

    def _described(self, product: Product) -> tuple[_Desc, tuple[_Layout, _Layout, _Layout]]:
        desc, flag = _Desc(), c_int32(_TRANSPOSED)
        self._call("MatmulDescInit_internal", byref(desc), c_size_t(sizeof(desc)), _COMPUTE_FLOAT, _FLOAT)
        self._call("MatmulDescSetAttribute", byref(desc), _DESC_TRANSA, byref(flag), _size(flag))
        if product.scales is not None:
            for attribute, mode in zip(_SCALE_MODES, _SCALES[product.scales], strict=True):
                held = c_int32(mode)
                self._call("MatmulDescSetAttribute", byref(desc), attribute, byref(held), _size(held))
            fast = c_int8(product.fast)
            self._call("MatmulDescSetAttribute", byref(desc), _DESC_FAST, byref(fast), _size(fast))
            # The heuristic asks whether there are scales, not which.
            self._point_to_scales(desc, *(self._workspace.data_ptr(),) * 2)
        kind, result_kind, sizes = _TYPES[product.dtype], _TYPES[product.result], c_size_t(sizeof(_Layout))
        made = []
        for rows, columns, leading, number in (
            (product.inputs, product.outputs, product.inputs, kind),
            (product.inputs, product.rows, product.stride, kind),
            (product.outputs, product.rows, product.outputs, result_kind),
        ):
            layout = _Layout()
            shape = (c_uint64(rows), c_uint64(columns), ctypes.c_int64(leading))
            self._call("MatrixLayoutInit_internal", byref(layout), sizes, number, *shape)
            made.append(layout)
        return desc, (made[0], made[1], made[2])

    def _point_to_scales(self, desc: _Desc, *places: int) -> None:
        for attribute, place in zip(_SCALE_POINTERS, places, strict=True):
            held = c_uint64(place)
            self._call("MatmulDescSetAttribute", byref(desc), attribute, byref(held), _size(held))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name} gave status {status}")


def open_library(device: torch.device) -> Blas | None:
    """The library on a device; None where it is not to be had, and products are torch's."""
    try:
        return Blas(device)
    except (OSError, AttributeError, RuntimeError) as problem:
        log.info("products of many rows are torch's: cublasLt is not to be had (%s)", problem)
        return None


def _size(value: Any) -> c_size_t:
    return c_size_t(sizeof(value))


def _configuration(lib: ctypes.CDLL, algo: _Algo) -> Algorithm:
    values = []
    for attribute, width in ((_ALGO_ID, c_int32), *_CONFIG):
        held, written = width(), c_size_t()
        if lib.cublasLtMatmulAlgoConfigGetAttribute(byref(algo), attribute, byref(held), _size(held), byref(written)):
            raise RuntimeError(f"cublasLt does not say attribute {attribute} of its algorithm")
        values.append(int(held.value))
    return Algorithm(*values)
