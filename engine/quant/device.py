"""What a GPU must have for quantized weights and caches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.models.reader import ConfigError
from engine.quant.weight import Weight
from kernels.hardware import fp8_conversions


def check_cache(device: torch.device) -> None:
    """Raises ConfigError where a GPU has no 8-bit floats."""
    if not fp8_conversions(device):
        raise ConfigError(
            "a cache of 8-bit floats needs a GPU that converts them (Ada, Hopper or later): set cache.dtype to 16bit"
        )


def check_weights(weights: Mapping[str, Weight], device: torch.device) -> None:
    """Raises ConfigError where a weight, or its scales, are 8-bit floats that the GPU does not have."""
    if fp8_conversions(device):
        return
    for name, weight in weights.items():
        if any(parameter.dtype == torch.float8_e4m3fn for parameter in weight.parameters()):
            raise ConfigError(
                f"{name} holds 8-bit floats (FP8, or scales of NVFP4), which need a GPU that converts them (Ada, "
                "Hopper or later): serve a checkpoint of 16-bit or integer weights; weights.quantize int8 and int4 work"
            )
