"""Quantized releases at full size: what is read from their configs, how each weight is held, and that tensors of the
published names, dtypes and shapes fill every parameter. Nothing of it takes memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.layers.build_context import BuildContext
from engine.layers.moe import Moe
from engine.models import registry
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.parts import with_shared_apart
from engine.quant import config as quantization
from engine.quant.formats.packed import PackedInt
from engine.quant.plan import plan, shared_apart
from engine.weights import loader
from engine.weights.checkpoint import Checkpoint, Entry
from kernels.select import select
from kernels.workspace import Workspace
from tests.gate.integers import KIMI_IGNORES, awq_config, compressed, gptq_config
from tests.models.test_published import values

KIMI: dict[str, Any] = {
    **values("kimi-k2-instruct-as-deepseek_v3"),
    "model_type": "kimi_k2",
    "num_hidden_layers": 3,
    "quantization_config": compressed(4, 32, ignore=KIMI_IGNORES),
}
EXPERTS, HIDDEN, INNER = 384, 7168, 2048


def made(config: ModelConfig) -> Decoder:
    cpu = torch.device("cpu")
    return Decoder(BuildContext(select(Workspace(cpu)), config, torch.bfloat16, cpu, max_model_len=8))


def kimi_tensors(prefix: str) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """As Kimi-K2-Thinking's files list them; K2.5's stand behind a prefix."""
    bf16, config = torch.bfloat16, KIMI
    heads, rank, q_rank = config["num_attention_heads"], config["kv_lora_rank"], config["q_lora_rank"]
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{prefix}{name}.weight", bf16, (config["vocab_size"], HIDDEN)
    yield f"{prefix}model.norm.weight", bf16, (HIDDEN,)
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", bf16, (HIDDEN,)
        plain = {
            "self_attn.q_a_proj": (q_rank, HIDDEN),
            "self_attn.q_a_layernorm": (q_rank,),
            "self_attn.q_b_proj": (heads * 192, q_rank),
            "self_attn.kv_a_proj_with_mqa": (rank + 64, HIDDEN),
            "self_attn.kv_a_layernorm": (rank,),
            "self_attn.kv_b_proj": (heads * 256, rank),
            "self_attn.o_proj": (HIDDEN, heads * 128),
        }
        inner, name = (config["intermediate_size"], "mlp") if layer == 0 else (INNER, "mlp.shared_experts")
        plain |= {f"{name}.{part}_proj": (inner, HIDDEN) for part in ("gate", "up")}
        plain[f"{name}.down_proj"] = (HIDDEN, inner)
        if layer:
            plain["mlp.gate"] = (EXPERTS, HIDDEN)
            yield f"{at}.mlp.gate.e_score_correction_bias", torch.float32, (EXPERTS,)
        for name, shape in plain.items():
            yield f"{at}.{name}.weight", bf16, shape
        for expert in range(EXPERTS if layer else 0):
            for part, n, k in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
                module = f"{at}.mlp.experts.{expert}.{part}_proj"
                yield f"{module}.weight_packed", torch.int32, (n, k // 8)
                yield f"{module}.weight_scale", bf16, (n, k // 32)
                yield f"{module}.weight_shape", torch.int64, (2,)


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_kimis_tensors_fill_every_parameter_with_shared_experts_beside_the_others(prefix: str) -> None:
    config, family, method = registry.parse(KIMI), registry.family_of(KIMI), quantization.read(KIMI)
    entries = {name: Entry(name, Path("none"), 0, dtype, shape) for name, dtype, shape in kimi_tensors(prefix)}
    checkpoint = registry.as_ruled(family, Checkpoint(entries))
    rules = family.rules(config)
    assert shared_apart(rules, checkpoint, method)
    config = with_shared_apart(config)
    decoder, rules = made(config), family.rules(config)
    rules = plan(decoder.weights, rules, checkpoint, method)
    assert loader.plan(dict(decoder.named_parameters()), checkpoint, rules)
    held = {name for name, weight in decoder.weights.items() if isinstance(weight.held, PackedInt)}
    assert held == {f"layers.{layer}.ffn.{part}" for layer in (1, 2) for part in ("gate_up", "down")}
    experts = decoder.weights["layers.1.ffn.gate_up"]
    assert experts.shape == (EXPERTS, 2 * INNER, HIDDEN)
    # half a byte a number, a scale of two for 32, and eight for a matrix's own shape
    assert experts.nbytes == experts.count // 2 + experts.count // 16 + 2 * EXPERTS * 8


@pytest.mark.parametrize(
    ("name", "said", "packed"),
    [
        ("llama-3.1-8b", compressed(4, 128), 4 * 32),
        ("llama-3.1-8b", compressed(8, 0), 4 * 32),
        ("llama-3.1-8b", gptq_config(4, 128, True, sym=True), 4 * 32),
        ("qwen3-8b", awq_config(128, modules_to_not_convert=None), 4 * 36),
        ("qwen3-30b-a3b", gptq_config(4, 128, dynamic={r"-:.*\.gate$": {}}), 4 * 48),
        ("qwen3-30b-a3b", awq_config(128, modules_to_not_convert=["down_proj"]), 3 * 48),
        ("deepseek-v2-lite", awq_config(64), 4 * 27 + 2 * 26),
        ("gemma3-4b", compressed(4, 128, ignore=["lm_head", "re:.*vision_tower.*"]), 4 * 34),
    ],
)
def test_projections_of_a_release_are_held_packed(name: str, said: dict[str, Any], packed: int) -> None:
    quantized = {**values(name), "quantization_config": said}
    config, family, method = registry.parse(quantized), registry.family_of(quantized), quantization.read(quantized)
    if shared_apart(family.rules(config), None, method):
        config = with_shared_apart(config)
    decoder = made(config)
    rules = plan(decoder.weights, family.rules(config), None, method)
    assert {rule.target for rule in rules} == set(dict(decoder.named_parameters()))
    assert sum(isinstance(weight.held, PackedInt) for weight in decoder.weights.values()) == packed
    assert not isinstance(decoder.embed.weight.held, PackedInt)


def test_shared_experts_apart_are_no_experts_of_a_table() -> None:
    quantized = {**values("deepseek-v2-lite"), "quantization_config": awq_config(64)}
    decoder = made(with_shared_apart(registry.parse(quantized)))
    moe = next(module for module in decoder.modules() if isinstance(module, Moe))
    assert moe.shared is not None
    assert moe.gate_up.shape[0] == moe.config.num_experts
    assert decoder.active == pytest.approx(made(registry.parse(quantized)).active, abs=0.01)
