"""8-bit floats, packed by code written from each format's definition, and what configs say of them."""

from __future__ import annotations

import re
from typing import Any

import torch

from tests.gate.fp4 import nvfp4
from tests.gate.integers import Pack, Tensors, compressed

E4M3_MAX = 448.0


def fp8_blocks(scale_dtype: torch.dtype, end: str = "weight_scale_inv", apart: bool = False) -> Pack:
    """Blocks of 128 × 128, the last ones cut off; scales multiply. apart: scales have a dimension more for the rows and
    columns of a block."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        n, k = w.shape
        wide = torch.zeros(-(-n // 128) * 128, -(-k // 128) * 128)
        wide[:n, :k] = w
        blocks = wide.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
        scale = (blocks.abs().amax(dim=(1, 3)) / E4M3_MAX).to(scale_dtype)
        spread = scale.float()[:, None, :, None]
        quantized = (blocks / spread).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        numbers = (quantized.float() * spread).flatten(2, 3).flatten(0, 1)[:n, :k]
        stored = scale[:, None, :, None] if apart else scale
        return {"weight": quantized.flatten(2, 3).flatten(0, 1)[:n, :k], end: stored}, numbers

    return pack


def fp8_rows(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A bfloat16 scale a row."""
    scale = (w.abs().amax(dim=1, keepdim=True) / E4M3_MAX).bfloat16()
    quantized = (w / scale.float()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return {"weight": quantized, "weight_scale": scale}, quantized.float() * scale.float()


def fp8_tensor(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale a tensor, and one for its inputs."""
    scale = (w.abs().amax() / E4M3_MAX).float()
    quantized = (w / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    inputs = torch.tensor(8 / E4M3_MAX)
    return {"weight": quantized, "weight_scale": scale, "input_scale": inputs}, quantized.float() * scale


BLOCKS: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def float_quantized(scales: str, **inputs: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors: every Linear but the head, inputs as given."""
    block = {"block_structure": [128, 128]} if scales == "block" else {}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": scales, "dynamic": False, **block}
    activations = {"num_bits": 8, "type": "float", "symmetric": True, **inputs}
    return {
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def mxfp8(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A power of two for 32 inputs, whose exponent is a byte: the least of which all numbers are within the range. The
    last group may be cut off."""
    k = w.shape[1]
    parts = torch.nn.functional.pad(w, (0, -k % 32)).unflatten(1, (-1, 32))
    exponent = torch.ceil(torch.log2(parts.abs().amax(dim=-1).clamp(min=1e-30) / E4M3_MAX))
    quantized = (parts / torch.exp2(exponent)[..., None]).to(torch.float8_e4m3fn)
    numbers = quantized.float() * torch.exp2(exponent)[..., None]
    scale = (exponent + 127).to(torch.uint8)
    return {"weight": quantized.flatten(1)[:, :k], "weight_scale": scale}, numbers.flatten(1)[:, :k]


def mxfp8_config(inputs: bool = False) -> dict[str, Any]:
    """compressed-tensors' quantization_config: every Linear but the head."""
    eight = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "dynamic": False, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"},
        "input_activations": {**eight, "dynamic": True, "scale_dtype": "torch.uint8"} if inputs else None,
        "format": "mxfp8-quantized",
    }
    return {**compressed(8, 0), "format": "mxfp8-quantized", "config_groups": {"group_0": group}}


def modelopt(algorithm: str, **other: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **other}


# By the keys that transformers and vLLM read, with a bound that inputs of small models reach.
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1.5, "modules_to_not_convert": ["lm_head"]}

# In the form of modelopt's mixed exports, with all that may be said: what a name stands for has parts, the nearest
# holds, and what is not named is stored as it is.
MIXED = {
    **modelopt("MIXED_PRECISION", producer={"name": "modelopt", "version": "0.44.0"}),
    "quantized_layers": {
        "model.layers.0": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.0.self_attn": {"quant_algo": "FP8"},
        "model.layers.0.self_attn.v_proj": {"quant_algo": "MXFP8", "group_size": 32},
        "model.layers.0.self_attn.kv_a_proj_with_mqa": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "model.layers.1": {"quant_algo": "FP8_PB_WO", "group_size": 128},
    },
}


def mixed_packs(module: str) -> bool:
    return module.startswith(("model.layers.0.", "model.layers.1."))


def mixed_pack(module: str) -> Pack | None:
    """What packs a module as MIXED says; None for rows."""
    if module.startswith("model.layers.1."):
        return fp8_blocks(torch.float32, "weight_scale", apart=True)
    if ".self_attn." not in module:
        return nvfp4(modelopt=True)
    if module.endswith("kv_a_proj_with_mqa"):
        return None
    return mxfp8 if module.endswith("v_proj") else fp8_tensor


_ROWS = float_quantized("channel", strategy="token", dynamic=True)["config_groups"]["group_0"]
_INT4 = compressed(4, 64)["config_groups"]["group_0"]
_FLOATS = r".*(k_proj|kv_a_proj_with_mqa|up_proj)$"
# Of what forms one product each is stored in its own way: keys in floats, values as they are, queries in integers; gate
# in integers, up in floats.
PARTS = {
    **compressed(4, 64, format="mixed-precision", ignore=["lm_head", r"re:.*\.v_proj$"]),
    "config_groups": {
        "group_0": {**_INT4, "format": "pack-quantized"},
        "group_1": {
            **_ROWS,
            "targets": [f"re:{_FLOATS}"],
            "format": "float-quantized",
        },
    },
}


def part_pack(module: str) -> Pack | None:
    """What packs a module as PARTS says; None for integers."""
    return fp8_rows if re.match(_FLOATS, module) else None
