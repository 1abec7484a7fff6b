"""Names of Gluon that changed after Triton 3.6."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store_box = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
load_pointers = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_memory = gl.shared_memory_descriptor
view = _memory.reinterpret if hasattr(_memory, "reinterpret") else _memory._reinterpret
aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate
