"""Dummy weights fill every kind of parameter."""

from __future__ import annotations

import torch

from engine.models.config import MoeConfig
from engine.weights import dummy
from tests.models.test_published import decoder, parse


def test_tables_of_experts_name_experts_that_exist_and_none_twice_a_token() -> None:
    config = parse(
        "deepseek-v4-flash-bf16",
        num_hidden_layers=2,
        vocab_size=33,
        hidden_size=32,
        head_dim=32,
        qk_rope_head_dim=8,
        num_attention_heads=2,
        q_lora_rank=8,
        o_lora_rank=8,
        o_groups=2,
        n_routed_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
    )
    model = decoder(config)
    model.materialize(torch.device("cpu"))
    parameters = dict(model.named_parameters())
    dummy.fill(model.others, model.weights, model.bounds, config.hidden, config.norm.offset)
    ffn = config.layers[0].ffn
    assert isinstance(ffn, MoeConfig)
    table = parameters["layers.0.ffn.table"]
    assert table.shape == (33, 3)
    assert all(len(set(row)) == 3 and max(row) < 7 for row in table.tolist())
    assert len(table.unique()) == 7
    assert all(p.isfinite().all() for p in parameters.values())


def test_norms_act_as_one_whatever_they_are_stored_around() -> None:
    config = parse(
        "qwen3.5-4b-text",
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        vocab_size=16,
        eos_token_id=None,
        hidden_size=32,
        intermediate_size=16,
    )
    model = decoder(config)
    model.materialize(torch.device("cpu"))
    parameters = dict(model.named_parameters())
    dummy.fill(model.others, model.weights, model.bounds, config.hidden, config.norm.offset)
    stored = {name: float(p.unique()) for name, p in parameters.items() if "norm" in name}
    assert stored.pop("layers.0.mixer.norm") == 1.0  # the gated norm's weight is the weight itself
    assert set(stored.values()) == {0.0}
