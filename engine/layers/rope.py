"""Tables of rotary embedding angles (Su et al. 2021, arXiv:2104.09864) and of its context extensions."""

from __future__ import annotations

import math

import torch

from engine.models.config import RopeConfig


def rope_table(config: RopeConfig | None, length: int, device: torch.device) -> torch.Tensor:
    """cos and sin of position · frequency, times the attention factor: [length, rotary_dim] float32, cos first.

    No config (a layer without rotary embedding) gives a table that turns by nothing.
    Angles are float32 products, as the models were trained with: at position 100,000 the rounding is part of the model.
    """
    if config is None:
        return torch.cat((torch.ones(length, 1, device=device), torch.zeros(length, 1, device=device)), dim=1)
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies(config, device)[None]
    return torch.cat((angles.cos(), angles.sin()), dim=1) * config.attention_factor


def frequencies(config: RopeConfig, device: torch.device) -> torch.Tensor:
    """Radians a position for each rotated pair: [rotary_dim / 2] float32."""
    channels = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device)
    plain = 1.0 / config.theta ** (channels / config.rotary_dim)
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, plain)
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """arXiv:2407.21783: slow waves are stretched by `factor`, fast ones kept, those between are blended.

    Turns in the original context decide: ≤ low_freq_factor is slow, ≥ high_freq_factor is fast.
    """
    turns = config.original_max_position * plain / (2 * math.pi)
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / config.factor + blend * plain


def _yarn(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv:2309.00071, §3.2): waves of under beta_slow turns are stretched, above beta_fast kept."""

    def channel(turns: float) -> float:
        """Where a wave makes `turns` turns in the original context."""
        span = math.log(config.original_max_position / (turns * 2 * math.pi))
        return config.rotary_dim * span / (2 * math.log(config.theta))

    low, high = channel(config.beta_fast), channel(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    index = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    stretched = ((index - low) / (high - low or 1e-3)).clamp(0.0, 1.0)
    return plain / config.factor * stretched + plain * (1 - stretched)
