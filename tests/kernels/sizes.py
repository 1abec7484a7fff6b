"""Cases of one model at another number of tokens: what varies from step to step while an engine serves.

Whatever the number, model sizes, the longest context and with it the width of tables stay as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from kernels.linear.cases import fp4_case, fp8_case, gguf_case, int8_case, packed_case
from kernels.moe_gemm.cases import fp4_case as fp4_experts
from kernels.moe_gemm.cases import gguf_case as gguf_experts
from kernels.moe_gemm.cases import packed_case as packed_experts
from kernels.moe_gemm.cases import w8a8_case as w8a8_experts
from kernels.registry import Case
from kernels.weight.inputs import Inputs

# About the sides of the tiles that products of quantized weights have.
QUANTIZED_COUNTS = (1, 2, 16, 17, 64, 65, 128, 256, 300)
# Numbers that the compiler likes to know of, 1 and multiples of 16, and others between them.
COUNTS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 50, 64, 65)
LONGEST = 400
BF16, F32 = torch.bfloat16, torch.float32

Step = Callable[[int], Case]
SeqShapes = list[tuple[int, int]]


def decoding(n: int) -> SeqShapes:
    return [(1, LONGEST)] * n


def prompt(n: int) -> SeqShapes:
    return [(n, LONGEST)]


def mixed(n: int) -> SeqShapes:
    """A prompt of n tokens beside n decoding sequences."""
    return [*decoding(n), (n + 1, LONGEST)]


def _made(op: str, *arguments: Any, **options: Any) -> Case:
    module = importlib.import_module(f"kernels.{op}.cases")
    build = getattr(module, "case", None) or module.case
    made: Case = build(*arguments, **options)
    return made


def of_tokens(op: str, *sizes: Any, dtype: torch.dtype = BF16, **options: Any) -> Step:
    """An op whose case takes (name, dtype, tokens, sizes...)."""
    return lambda n: _made(op, "", dtype, n, *sizes, **options)


def _fp8(inputs: Inputs, **options: Any) -> Step:
    block = (128, 128) if inputs.group else None
    return lambda n: fp8_case("", BF16, n, 96, 256, block, inputs, **options)


def _packed(bits: int, group: int, **options: Any) -> Step:
    return lambda n: packed_case("", BF16, n, 96, 256, bits, group, **options)


def _of_seqs(op: str, seqs: Callable[[int], SeqShapes], *sizes: Any, dtype: torch.dtype = BF16, **options: Any) -> Step:
    """An op whose case takes (name, dtype, sequences, sizes...)."""
    return lambda n: _made(op, "", dtype, seqs(n), *sizes, **options)


def steps() -> dict[str, dict[str, Step]]:
    """By op: kinds of steps, each a case for a number."""
    made: dict[str, dict[str, Step]] = {
        "repack": {
            "awq": lambda n: _made("repack", "", "awq", 7 * n, 8 * n),
            "gptq": lambda n: _made("repack", "", "gptq", n, 8 * n),
            "gptq in an order": lambda n: _made("repack", "", "gptq", n, 8 * n, ordered=True),
            "pack-quantized": lambda n: _made("repack", "", "pack-quantized", n, 4 * n, 8, ordered=True, apart=n % 4),
        },
        "round_rows": {
            kind: lambda n, kind=kind: _made("round_rows", "", BF16, n, 96, kind) for kind in ("fp8", "int8", "int4")
        },
        "move_words": {
            "step": lambda n: _made("move_words", "", 7 * n, 0),
            "changes": lambda n: _made("move_words", "", 7 * n, 3 * n),
        },
        "token_inputs": {
            "decoding": lambda n: _made("token_inputs", "", [1] * n, LONGEST),
            "prompt": lambda n: _made("token_inputs", "", [n], LONGEST),
        },
        "shift_entries": {
            "decoding": lambda n: _made("shift_entries", "", [1] * n, drafts=False),
            "drafts": lambda n: _made("shift_entries", "", [4] * n),
        },
        "put_drafts": {"seqs": lambda n: _made("put_drafts", "", n)},
        "draft_places": {
            "seqs": lambda n: _made("draft_places", "", n, 3),
            "depth": lambda n: _made("draft_places", "", 5, n),
        },
        "accept_drafts": {"seqs": lambda n: _made("accept_drafts", "", [3] * n, 3)},
        "keep_tokens": {"seqs": lambda n: _made("keep_tokens", "", n)},
        "mask_logits": {"seqs": lambda n: _made("mask_logits", "", F32, n, n, 320)},
        "embedding": {"tokens": of_tokens("embedding", 320, 96)},
        "rms_norm": {"tokens": of_tokens("rms_norm", 96), "residual": of_tokens("rms_norm", 96, residual=True)},
        "norm_add": {"tokens": of_tokens("norm_add", 96)},
        "linear": {
            "norm": of_tokens("linear", 96, 64, norm=True),
            "residual": of_tokens("linear", 64, 96, residual=True),
            "silu": of_tokens("linear", 48, 64, norm=True, activation="silu"),
            "deterministic": of_tokens("linear", 96, 64, norm=True, deterministic=True),
            "fp8 groups": _fp8(Inputs("fp8", 128), residual=True),
            "fp8 rows": _fp8(Inputs("fp8"), norm=True, activation="silu"),
            "int8 both sides": lambda n: int8_case("", BF16, n, 96, 256, Inputs("int8"), norm=True, activation="silu"),
            "int4 groups": _packed(4, 32, zeros=True, ordered=True, residual=True),
            "int8 rows": _packed(8, 256, norm=True, activation="silu"),
        },
        "quantize": {
            "groups": lambda n: _made("quantize", "", BF16, n, 256, 128),
            "row": lambda n: _made("quantize", "", BF16, n, 256, norm=True),
            "integers": lambda n: _made("quantize", "", BF16, n, 256, number="int8"),
            "gated": lambda n: _made("quantize", "", BF16, n, 256, activation="silu"),
        },
        "round_fp4": {
            "numbers": lambda n: _made("round_fp4", "", BF16, n, 256, 16),
            "exponents": lambda n: _made("round_fp4", "", BF16, n, 256, 32, norm=True),
        },
        "linear_norm": {"tokens": of_tokens("linear_norm", 96, 64)},
        "gated_mlp": {
            "dense": of_tokens("gated_mlp", 64, 48, norm=True, residual=True),
            "fp8 groups": of_tokens("gated_mlp", 128, 256, fp8=((128, 128), Inputs("fp8", 128)), norm=True),
        },
        "rope_kv_write": {"tokens": of_tokens("rope_kv_write", 4, 2, 64, qk_norm=True, strided=True)},
        "gated_activation": {"tokens": of_tokens("gated_activation", 96)},
        "latent_write": {
            "absorbed": lambda n: _made("latent_write", "", BF16, n, 4, 64, 16, 32, n),
            "expanded": lambda n: _made("latent_write", "", BF16, n + 5, 4, 64, 16, 32, 5),
        },
        "latent_partials": {"seqs": lambda n: _made("latent_partials", "", BF16, [LONGEST] * n, 4, 64, 16)},
        "gated_norm": {"tokens": of_tokens("gated_norm", 4, 32)},
        "sigmoid_gate": {"tokens": of_tokens("sigmoid_gate", 96)},
        "rotate_tail": {"tokens": of_tokens("rotate_tail", 4, 32, 16)},
        "shared_kv_write": {"tokens": of_tokens("shared_kv_write", 4, 64, 16)},
        "group_linear": {
            "tokens": of_tokens("group_linear", 2, 64, 48),
            "fp8": of_tokens("group_linear", 2, 256, 48, fp8=True),
        },
        "hyper_mix": {"tokens": of_tokens("hyper_mix", 4, 64, 2)},
        "hyper_merge": {"tokens": of_tokens("hyper_merge", 4, 64)},
        "moe_route": {"tokens": of_tokens("moe_route", 64, 32, 4, norm=True)},
        "moe_gemm": {
            "tokens": of_tokens("moe_gemm", 64, 32, 16, 4),
            "int4": lambda n: packed_experts("", BF16, n, 64, 32, 16, 4),
            "fp8": lambda n: w8a8_experts("", BF16, n, 256, 256, 16, 4, Inputs("fp8", 128), (128, 128)),
            "int8": lambda n: w8a8_experts("", BF16, n, 256, 256, 16, 4, Inputs("int8"), whole=True),
        },
        "moe": {
            "tokens": of_tokens("moe", 64, 32, 16, 4, norm=True),
            "groups": of_tokens("moe", 64, 32, 16, 4, num_groups=4, top_groups=2),
        },
        "penalties": {"seqs": lambda n: _made("penalties", "", F32, 320, [(10, LONGEST, 1.1, 0.1, 0.1)] * n)},
        "sample": {
            "plain": lambda n: _made("sample", "", BF16, 320, [(1.0, 0, 1.0, 0.0)] * n),
            "filters": lambda n: _made("sample", "", BF16, 320, [(0.7, 50, 0.9, 0.02)] * n),
        },
        "peer_gather": {"tokens": lambda n: _made("peer_gather", "", BF16, n, 64, 2, 0)},
        "peer_merge": {"tokens": lambda n: _made("peer_merge", "", BF16, n, 2, 64, 2, 1)},
        "peer_sum": {
            f"{way}, {parts}": lambda n, two_shot=way == "two-shot", norm=parts == "norm": _made(
                "peer_sum", "", BF16, 2 * n, 64, 2, 0, two_shot, norm, norm
            )
            for way in ("one-shot", "two-shot")
            for parts in ("sum alone", "norm")
        },
        "sample_candidates": {
            "part": lambda n: _made("sample_candidates", "", BF16, 160, 160, 320, [(0.7, 50, 0.9, 0.02)] * n)
        },
        "sample_merge": {
            "three parts": lambda n: _made("sample_merge", "", 107, 3, [(0.7, 50, 0.9, 0.02)] * n),
        },
        "logprobs": {"seqs": of_tokens("logprobs", 320, 5)},
    }
    sizes: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "paged_attention": ((4, 2, 64), {"strided": True}),
        "latent_attention": ((4, 64, 16, 32), {}),
        "rope_attention": ((4, 2, 64), {"strided": True, "qk_norm": True}),
        "causal_conv": ((64,), {}),
        "gated_delta": ((1, 2, 32, 32), {}),
        "delta_net": ((1, 2, 32, 32), {}),
        "compress_kv": ((32, 4, True, 16, 16), {}),
        "index_topk": ((4, 32, 4, 8, 16), {}),
        "sparse_attention": ((4, 32, 16, 24, 16), {"ratio": 4, "chosen": 6}),
    }
    for op, (arguments, options) in sizes.items():
        made[op] = {seqs.__name__: _of_seqs(op, seqs, *arguments, **options) for seqs in (decoding, prompt, mixed)}
    made["latent_attention"]["expanded"] = _of_seqs("latent_attention", mixed, 4, 64, 16, 32, expanded=True)
    return made


def wide_steps() -> dict[str, dict[str, Step]]:
    """Steps of ops that take tokens, as wide as models are: the warps of a row and the slices of a product go by it."""
    return {
        "rms_norm": {"tokens": of_tokens("rms_norm", 2560)},
        "linear": {
            "norm": of_tokens("linear", 4160, 2560, norm=True),
            "residual": of_tokens("linear", 96, 2560, residual=True),
            "silu": of_tokens("linear", 64, 2560, norm=True, activation="silu"),
            "bias and residual": of_tokens("linear", 2632, 1544, bias=True, residual=True),
            "head": of_tokens("linear", 17000, 264),
            "wide silu": of_tokens("linear", 8520, 264, norm=True, activation="silu"),
        },
        "rope_kv_write": {"tokens": of_tokens("rope_kv_write", 32, 8, 128, qk_norm=True)},
        "moe_route": {"tokens": of_tokens("moe_route", 2048, 32, 4, norm=True)},
        "moe": {
            "tokens": of_tokens("moe", 2048, 32, 16, 4, norm=True),
            "groups": of_tokens("moe", 2048, 32, 16, 4, num_groups=4, top_groups=2, norm=True),
        },
    }


def quantized_steps(dtype: torch.dtype = BF16) -> dict[str, dict[str, Step]]:
    """Steps of ops whose weights or caches are quantized, of every kind: products of so many inputs that few rows have
    these in slices, and tables of so few experts that some have several tiles of pairs."""
    row, group, byte = Inputs("fp8"), Inputs("fp8", 128), Inputs("int8")
    given, square = torch.tensor(0.02), (128, 128)
    n, k, hidden, inner, experts, each = 72, 1104, 128, 64, 3, 2
    sizes, table = (n, k), (hidden, inner, experts, each)
    silu: dict[str, Any] = {"norm": True, "activation": "silu"}
    oai: dict[str, Any] = {"biased": True, "activation": "swiglu_oai", "limit": 1.0}
    mixed_blocks = {"Q4_K": 33, "Q6_K": 32, "F16": 7}
    linear: dict[str, Step] = {
        "fp8 blocks": lambda t: fp8_case("", dtype, t, *sizes, square, group, norm=True, residual=True),
        "fp8 blocks, silu": lambda t: fp8_case("", dtype, t, *sizes, square, group, **silu),
        "fp8 blocks, inputs as they are": lambda t: fp8_case("", dtype, t, *sizes, square, Inputs(), bias=True),
        "fp8 rows": lambda t: fp8_case("", dtype, t, *sizes, None, row, bias=True, residual=True),
        "fp8 rows, a given scale": lambda t: fp8_case("", dtype, t, *sizes, None, Inputs("fp8", scale=given)),
        "int8 both sides": lambda t: int8_case("", dtype, t, *sizes, byte, norm=True, residual=True),
        "int8 both sides, silu": lambda t: int8_case("", dtype, t, *sizes, byte, **silu),
        "int8 rows, inputs as they are": lambda t: int8_case("", dtype, t, *sizes, Inputs()),
        "int4 groups": lambda t: packed_case("", dtype, t, *sizes, 4, 128, zeros=True, norm=True, residual=True),
        "int4 groups, silu": lambda t: packed_case("", dtype, t, *sizes, 4, 128, **silu),
        "int4 groups in an order": lambda t: packed_case("", dtype, t, *sizes, 4, 32, zeros=True, ordered=True),
        "int8 groups": lambda t: packed_case("", dtype, t, *sizes, 8, 64, bias=True),
        "mxfp4": lambda t: fp4_case("", dtype, t, *sizes, 32, norm=True, residual=True),
        "nvfp4, silu": lambda t: fp4_case("", dtype, t, *sizes, 16, factors=True, **silu),
        "nvfp4, rounded inputs": lambda t: fp4_case("", dtype, t, *sizes, 16, factors=True, rounds=True, norm=True),
        "blocks of three formats": lambda t: gguf_case("", dtype, t, n, 1280, mixed_blocks, norm=True, residual=True),
        "blocks, silu": lambda t: gguf_case("", dtype, t, n, 1280, "Q4_K", **silu),
        "blocks, gate and up in two formats": lambda t: gguf_case("", dtype, t, n, 512, {"Q4_K": n, "Q5_K": n}, **silu),
    }
    moe_gemm: dict[str, Step] = {
        "fp8 blocks": lambda t: w8a8_experts("", dtype, t, *table, group, square, residual=True),
        "fp8 rows": lambda t: w8a8_experts("", dtype, t, *table, row, limit=0.5),
        "int8 both sides": lambda t: w8a8_experts("", dtype, t, *table, byte, whole=True, **oai),
        "int8 rows, inputs as they are": lambda t: w8a8_experts("", dtype, t, *table, Inputs(), whole=True),
        "int4 groups": lambda t: packed_experts("", dtype, t, *table, group=128, zeros=True, residual=True),
        "int4 groups in an order": lambda t: packed_experts("", dtype, t, *table, zeros=True, ordered=True),
        "int8 groups, some elsewhere": lambda t: packed_experts("", dtype, t, *table, 8, 64, absent=2),
        "mxfp4": lambda t: fp4_experts("", dtype, t, *table, **oai),
        "nvfp4, rounded inputs": lambda t: fp4_experts("", dtype, t, *table, 16, True, True, residual=True),
        "blocks": lambda t: gguf_experts("", dtype, t, *table, "Q8_0 Q8_0 Q5_1", residual=True),
        "blocks, gate and up in two formats": lambda t: gguf_experts("", dtype, t, 256, 64, 3, 2, "Q4_K Q6_K Q8_0"),
    }
    made: dict[str, dict[str, Step]] = {"linear": linear, "moe_gemm": moe_gemm}
    made["rope_kv_write"] = {
        "8 bits": of_tokens("rope_kv_write", 4, 2, 64, dtype=dtype, qk_norm=True, scales=(0.02, 0.1))
    }
    made["latent_write"] = {"8 bits": lambda t: _made("latent_write", "", dtype, t, 4, 64, 16, 32, t, fp8_scale=0.02)}
    attention: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "paged_attention": ((4, 2, 64), {"scales": (0.1, 0.2)}),
        "rope_attention": ((4, 2, 64), {"qk_norm": True, "scales": (0.1, 0.2)}),
        "latent_attention": ((4, 64, 16, 32), {"fp8_scale": 0.02}),
    }
    for op, (arguments, options) in attention.items():
        made[op] = {
            seqs.__name__: _of_seqs(op, seqs, *arguments, dtype=dtype, **options) for seqs in (decoding, prompt, mixed)
        }
    return made
