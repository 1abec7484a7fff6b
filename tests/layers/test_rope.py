"""Rope tables against transformers, and as far as a context goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.layers.rope import frequencies, rope_table
from engine.models.config import RopeConfig
from engine.models.reader import Reader
from engine.models.rope import scaled as scaled_rope

CPU = torch.device("cpu")
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn, not truncated": {"factor": 8.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn, betas the wrong way round": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 1,
        "beta_slow": 4,
    },
    "yarn, one beta": {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0},
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_as_transformers_computes_it(name: str, head_dim: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = name.partition(",")[0]
    parameters = {"rope_type": kind, "rope_theta": 5e5, **KINDS[name]}
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2, num_attention_heads=2, max_position_embeddings=16384, rope_parameters=dict(parameters)
    )
    ours = scaled_rope(Reader({**parameters, "partial_rotary_factor": 1.0}), head_dim, 16384, interleaved=False)
    if kind == "default":
        theirs, factor = 1.0 / 5e5 ** (torch.arange(0, head_dim, 2) / head_dim), 1.0
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    torch.testing.assert_close(frequencies(ours, CPU), theirs, rtol=1e-6, atol=0)
    assert ours.attention_factor == pytest.approx(factor)


def test_the_table_reaches_every_position_of_the_context() -> None:
    length = 40960
    table = rope_table(RopeConfig(theta=1e6, rotary_dim=128), length, CPU)
    assert table.shape == (length, 128)
    for position in (0, 4095, 4096, 4097, length - 1):
        angles = position * frequencies(RopeConfig(theta=1e6, rotary_dim=128), CPU)
        torch.testing.assert_close(table[position], torch.cat((angles.cos(), angles.sin())))


def test_yarn_multiplies_the_whole_table() -> None:
    config = RopeConfig(theta=1e4, rotary_dim=64, kind="yarn", factor=4.0, original_max_position=1024)
    scaled = RopeConfig(
        theta=1e4, rotary_dim=64, kind="yarn", factor=4.0, original_max_position=1024, attention_factor=1.25
    )
    torch.testing.assert_close(rope_table(scaled, 8, CPU), 1.25 * rope_table(config, 8, CPU))


def test_a_layer_without_rope_turns_nothing() -> None:
    table = rope_table(None, 3, CPU)
    assert table.tolist() == [[1.0, 0.0]] * 3
