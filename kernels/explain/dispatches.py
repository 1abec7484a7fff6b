"""Every dispatch there is, by the op that asks it and what it decides."""

from __future__ import annotations

from typing import Any

from kernels.dispatch import Dispatch
from kernels.gated_mlp import dispatch as gated_mlp
from kernels.group_linear import dispatch as group_linear
from kernels.latent_attention import dispatch as latent_attention
from kernels.linear import dispatch as dense_linear
from kernels.linear import fp8_dispatch as fp8_linear
from kernels.linear import gguf_dispatch as gguf_linear
from kernels.linear import packed_dispatch as packed_linear
from kernels.linear_norm import dispatch as linear_norm
from kernels.moe import dispatch as dense_moe
from kernels.moe_gemm import dispatch as dense_experts
from kernels.moe_gemm import gguf_dispatch as gguf_experts
from kernels.moe_gemm import quantized_dispatch as quantized_experts
from kernels.paged_attention import dispatch as paged_attention
from kernels.rope_attention import dispatch as rope_attention

# An op before those that it calls.
DISPATCHES: dict[str, Dispatch[Any]] = {
    "moe": dense_moe.DISPATCH,
    "moe_gemm, quantized experts": quantized_experts.DISPATCH,
    "moe_gemm, experts of GGUF files": gguf_experts.DISPATCH,
    "moe_gemm, dense experts": dense_experts.DISPATCH,
    "gated_mlp": gated_mlp.DISPATCH,
    "linear_norm": linear_norm.DISPATCH,
    "linear, packed integers and 4-bit floats": packed_linear.DISPATCH,
    "linear, 8-bit floats and integers": fp8_linear.DISPATCH,
    "linear, blocks of GGUF files": gguf_linear.DISPATCH,
    "linear, dense weight": dense_linear.DISPATCH,
    "group_linear": group_linear.DISPATCH,
    "rope_attention": rope_attention.DISPATCH,
    "paged_attention, longer sequences": paged_attention.LONGER,
    "paged_attention, sequences of one query": paged_attention.SINGLES,
    "latent_attention, longer sequences": latent_attention.LONGER,
    "latent_attention, sequences of one query": latent_attention.SINGLES,
}
