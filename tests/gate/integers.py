"""Packings of 4-bit and 8-bit integers, written from each format's definition: compressed-tensors' pack-quantized, GPTQ
and AWQ."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """numbers [R, C] → [R, ceil(C · bits / 32)] int32: number c at bit bits · (c mod 32/bits) of its word."""
    per = 32 // bits
    made = torch.zeros(numbers.shape[0], -(-numbers.shape[1] // per), dtype=torch.int64)
    for c in range(numbers.shape[1]):
        made[:, c // per] |= numbers[:, c].long() << (bits * (c % per))
    return made.to(torch.int32)  # of the lowest 32 bits


def groups_of(inputs: int, group: int, ordered: bool) -> torch.Tensor:
    """The group of each input [K], the same for all matrices of so many inputs; group 0 is one of all."""
    runs = torch.arange(inputs) // (group or inputs)
    if not ordered:
        return runs
    return runs[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]


def rounded(
    w: torch.Tensor, bits: int, groups: torch.Tensor, zeros: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a matrix [N, K]: unsigned numbers [N, K], scales and zero points [N, G], and what they stand for."""
    n, count, most = len(w), int(groups.max()) + 1, (1 << bits) - 1
    scale, zero = torch.empty(n, count, dtype=dtype), torch.full((n, count), 1 << (bits - 1))
    for g in range(count):
        part = w[:, groups == g]
        if zeros:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, g] = ((high - low) / most).clamp(min=1e-6).to(dtype)
            zero[:, g] = (-low / scale[:, g].float()).round().clamp(1, most).long()
        else:
            scale[:, g] = (part.abs().amax(1) / (most / 2)).clamp(min=1e-6).to(dtype)
    s, z = scale.float()[:, groups], zero[:, groups]
    numbers = ((w / s).round() + z).clamp(0, most).long()
    return numbers, scale, zero, (numbers - z) * s


def pack_quantized(bits: int, group: int, zeros: bool = False, ordered: bool = False) -> Pack:
    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = groups_of(w.shape[1], group, ordered)
        numbers, scale, zero, meant = rounded(w, bits, groups, zeros, torch.bfloat16)
        made = {
            "weight_packed": words(numbers, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(w.shape, dtype=torch.int64),
        }
        if zeros:
            made["weight_zero_point"] = words(zero.T, bits).T
        if ordered:
            made["weight_g_idx"] = groups.int()
        return made, meant

    return pack


def int4_bytes(group: int) -> Pack:
    """compressed-tensors' int-quantized of 4 bits: a number with its sign in each byte."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scale, _, meant = rounded(w, 4, groups_of(w.shape[1], group, False), False, torch.bfloat16)
        return {"weight": (numbers - 8).to(torch.int8), "weight_scale": scale}, meant

    return pack


# The scale of the inputs of w4afp8's experts, whose largest magnitude it takes for 8.
EXPERT_INPUTS = 8 / 448


def w4afp8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Two numbers with their signs in a byte, the first in the low bits, and one scale for 128 inputs."""
    numbers, scale, _, meant = rounded(w, 4, groups_of(w.shape[1], 128, False), False, torch.bfloat16)
    signed = (numbers - 8) & 15
    both = (signed[:, 0::2] | signed[:, 1::2] << 4).to(torch.uint8).view(torch.int8)
    return {"weight": both, "weight_scale_inv": scale, "input_scale": torch.tensor(EXPERT_INPUTS)}, meant


def gptq(bits: int, group: int, shift: int = 1, zeros: bool = True, ordered: bool = False) -> Pack:
    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = groups_of(w.shape[1], group, ordered)
        numbers, scale, zero, meant = rounded(w, bits, groups, zeros, torch.float16)
        made = {
            "qweight": words(numbers, bits).T,
            "qzeros": words(zero.T - shift, bits),
            "scales": scale.T,
            "g_idx": groups.int(),
        }
        return made, meant

    return pack


def awq(group: int) -> Pack:
    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        numbers, scale, zero, meant = rounded(w, 4, groups_of(w.shape[1], group, False), True, torch.float16)

        def along_outputs(table: torch.Tensor) -> torch.Tensor:
            return words(table.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)

        return {"qweight": along_outputs(numbers), "qzeros": along_outputs(zero), "scales": scale.T}, meant

    return pack


def int8_rows(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A scale a row: the largest magnitude over half of what 255 steps span."""
    scale = (w.abs().amax(dim=1, keepdim=True) / 127.5).bfloat16()
    numbers = (w / scale.float()).round().clamp(-128, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}, numbers * scale.float()


def int8_tensor(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale a tensor, and one for its inputs."""
    scale = (w.abs().amax() / 127.5).reshape(1)
    numbers = (w / scale).round().clamp(-128, 127)
    made = {"weight": numbers.to(torch.int8), "weight_scale": scale, "input_scale": torch.tensor([8 / 127.5])}
    return made, numbers * scale


def rounded_to(kind: str) -> Pack:
    """A checkpoint as it is, and what its numbers are rounded to while it is loaded."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if kind == "int4":
            groups = groups_of(w.shape[1], 32, False)
            return {"weight": w}, rounded(w, 4, groups, False, torch.bfloat16)[3]
        scale = w.abs().amax(dim=1, keepdim=True) / (448 if kind == "fp8" else 127.5)
        ratio = w / scale
        numbers = ratio.to(torch.float8_e4m3fn).float() if kind == "fp8" else ratio.round().clamp(-128, 127)
        return {"weight": w}, numbers * scale

    return pack


def matching(pattern: str, pack: Pack) -> Callable[[str], Pack | None]:
    """`pack` for modules whose names begin with the pattern."""
    return lambda module: pack if re.match(pattern, module) else None


def compressed(
    bits: int, group: int, symmetric: bool = True, actorder: str | None = None, **other: Any
) -> dict[str, Any]:
    """A quantization_config of compressed-tensors: every Linear but the head."""
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
        "group_size": group or None,
        "dynamic": False,
        "actorder": actorder,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    held = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "config_groups": {"group_0": held},
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **other,
    }


def with_inputs(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """A quantization_config whose products round their inputs to 8 bits of that kind, by row."""
    inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], "input_activations": inputs}}}


def int_quantized(scales: str, **inputs: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors: every Linear but the head, inputs as given, if any."""
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": scales, "dynamic": False, "group_size": None},
        "input_activations": {**eight, **inputs} if inputs else None,
    }
    return {**compressed(8, 0), "format": "int-quantized", "config_groups": {"group_0": group}}


def gptq_config(bits: int, group: int, desc_act: bool = False, sym: bool = False, **other: Any) -> dict[str, Any]:
    said = {"bits": bits, "group_size": group or -1, "desc_act": desc_act, "sym": sym, "lm_head": False}
    return {"quant_method": "gptq", "checkpoint_format": "gptq", **said, **other}


def awq_config(group: int, **other: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True, **other}


# As Kimi-K2-Thinking says it.
KIMI_IGNORES = [
    r"re:.*self_attn.*",
    r"re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*lm_head.*",
]
