"""4-bit floats, packed by code written from each format's definition (OCP Microscaling Formats 1.0, section 5.3.3)."""

from __future__ import annotations

from typing import Any

import torch

from tests.gate.integers import Pack, Tensors

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _codes(ratio: torch.Tensor) -> torch.Tensor:
    return (ratio[..., None] - VALUES).abs().argmin(dim=-1).to(torch.uint8)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def mxfp4(data: str = "weight_packed", end: str = "weight_scale", named: bool = False) -> Pack:
    """A power of two for 32 inputs. named: dtypes are int8 and e8m0, as DeepSeek writes them, and not bytes."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts = w.unflatten(1, (-1, 32))
        exponent = torch.floor(torch.log2(parts.abs().amax(dim=-1).clamp(min=1e-30))) - 2
        codes = _codes(parts / torch.exp2(exponent)[..., None])
        numbers = VALUES[codes.int()] * torch.exp2(exponent)[..., None]
        scale, packed = (exponent + 127).to(torch.uint8), _bytes(codes.flatten(1))
        if named:
            scale, packed = scale.view(torch.float8_e8m0fnu), packed.view(torch.int8)
        return {data: packed, end: scale}, numbers.flatten(1)

    return pack


# The factor of a product's inputs, whose largest magnitude it takes for 16.
INPUT_FACTOR = 16 / (6 * 448)


def nvfp4(modelopt: bool = False, inputs: bool = False) -> Pack:
    """An 8-bit float for 16 inputs and a factor a tensor, which divides (compressed-tensors) or multiplies. inputs: one
    for the product's inputs, too."""

    def pack(w: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts = w.unflatten(1, (-1, 16))
        factor = (w.abs().amax() / (6 * 448)).reshape(1)
        scale = (parts.abs().amax(dim=-1) / 6 / factor).clamp(1 / 64, 448).to(torch.float8_e4m3fn)
        each = (scale.float() * factor)[..., None]
        codes = _codes(parts / each)
        numbers = (VALUES[codes.int()] * each).flatten(1)
        packed = _bytes(codes.flatten(1))
        if modelopt:
            given = {"input_scale": torch.tensor(INPUT_FACTOR)} if inputs else {}
            return {"weight": packed, "weight_scale": scale, "weight_scale_2": factor.reshape(()), **given}, numbers
        given = {"input_global_scale": torch.tensor([1 / INPUT_FACTOR])} if inputs else {}
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": 1 / factor, **given}, numbers

    return pack


def fp4_config(layout: str, inputs: bool = False) -> dict[str, Any]:
    """compressed-tensors' quantization_config: every Linear but the head."""
    fine = layout == "nvfp4-pack-quantized"
    scaled = {"strategy": "tensor_group", "group_size": 16} if fine else {"strategy": "group", "group_size": 32}
    numbers = {"num_bits": 4, "type": "float", "symmetric": True, **scaled}
    activations = {**numbers, "dynamic": "local" if fine else True} if inputs else None
    group = {
        "targets": ["Linear"],
        "weights": {**numbers, "dynamic": False},
        "input_activations": activations,
        "output_activations": None,
        "format": layout,
    }
    return {
        "config_groups": {"group_0": group},
        "format": layout,
        "ignore": ["lm_head"],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "exclude_modules": ["lm_head"]}
MODELOPT_INPUTS = {**MODELOPT, "quant_algo": "NVFP4"}
