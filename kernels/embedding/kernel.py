"""Embedding gather in Triton."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.embedding import reference
from kernels.linear.gguf_rows import write_numbers
from kernels.sizes import cdiv
from kernels.weight import Dense, GgufBlocks, Weight
from kernels.workspace import Workspace

_BLOCK = 1024


@triton.jit(do_not_specialize_on_alignment=["p_ids"])
def _gather(
    p_ids, p_weight, p_y, E, weight_stride, scale, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_columns = columns < E
    row = tl.load(p_ids + i_token).to(tl.int64)
    y = tl.load(p_weight + row * weight_stride + columns, mask=m_columns, other=0.0)
    if HAS_SCALE:
        y = (y.to(tl.float32) * scale).to(y.dtype)
    tl.store(p_y + i_token * E + columns, y, mask=m_columns)


@lru_cache(maxsize=64)
def _rounded(scale: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(scale, dtype=dtype))


def embedding(
    workspace: Workspace, ids: torch.Tensor, weight: Weight, dtype: torch.dtype, scale: float = 1.0
) -> torch.Tensor:
    """y[t] = weight[ids[t]] * scale, with `scale` rounded to `dtype` first (as Gemma does).

    One program copies up to 1024 channels of one token. Shapes as in the reference; rows of a dense weight may be
    strided.
    """
    if isinstance(weight, GgufBlocks) and len(weight.parts) == 1:
        y = torch.empty(len(ids), weight.inputs, dtype=dtype, device=ids.device)
        write_numbers(workspace, weight.parts[0], weight.formats[0], y, ids, _rounded(scale, dtype))
        return y
    if not isinstance(weight, Dense) or weight.data.dtype != dtype:
        return reference.embedding(ids, weight, dtype, scale)
    data = weight.data
    tokens, channels = ids.shape[0], data.shape[1]
    y = torch.empty((tokens, channels), dtype=dtype, device=ids.device)
    if tokens:
        pdl = workspace.pdl
        workspace.launch(_gather, (tokens, cdiv(channels, _BLOCK)))(
            ids,
            data,
            y,
            channels,
            data.stride(0),
            _rounded(scale, dtype),
            HAS_SCALE=scale != 1.0,
            BLOCK=_BLOCK,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=4,
        )
    return y
