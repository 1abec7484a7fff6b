"""What the families with latent attention have in common: its config and its weight names."""

from __future__ import annotations

import math

from engine.models import parts, rope, weight_rules
from engine.models.config import LatentAttentionConfig, LayerConfig, ModelConfig, MoeConfig
from engine.models.reader import Reader
from engine.weights.rules import Flat, Rule, Split, concat


def attention(reader: Reader, interleaved: bool) -> LatentAttentionConfig:
    """Latent attention; YaRN with `mscale_all_dim` also scales the scores (DeepSeek-V2 2024, arXiv:2405.04434)."""
    reader.assume(q_lora_rank=1536)
    nope, rope_dim = reader.size("qk_nope_head_dim"), reader.size("qk_rope_head_dim")
    heads = reader.size("num_attention_heads")
    reader.require("num_key_value_heads", heads, default=heads)
    reader.skip("head_dim", "qk_head_dim")  # both follow from the parts
    rotary = rope.from_config(reader, rope_dim, interleaved=interleaved)
    all_dim = Reader(rope.values(reader)[1]).read(float, "mscale_all_dim", 0.0)
    mscale = 0.1 * all_dim * math.log(rotary.factor) + 1.0 if all_dim and rotary.factor > 1 else 1.0
    q_rank, bias = reader.size("q_lora_rank", None), reader.read(bool, "attention_bias", False)
    reader.check(
        not (bias and q_rank is None),
        "attention_bias = True is not implemented without q_lora_rank: queries have no bias then",
    )
    return LatentAttentionConfig(
        num_heads=heads,
        q_rank=q_rank,
        kv_rank=reader.size("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope_dim,
        value_dim=reader.size("v_head_dim"),
        scale=(nope + rope_dim) ** -0.5 * mscale * mscale,
        rope=rotary,
        bias=bias,
    )


def layers(reader: Reader, mixer: LatentAttentionConfig, experts: MoeConfig) -> tuple[LayerConfig, ...]:
    """The first layers are dense, the others routed."""
    reader.require("moe_layer_freq", 1, default=1)
    reader.skip("aux_loss_alpha", "seq_aux", "ep_size", "router_aux_loss_coef", "output_router_logits")
    dense, mlp = reader.size("first_k_dense_replace", least=0), parts.mlp(reader)
    return tuple(LayerConfig(mixer, mlp if i < dense else experts) for i in range(parts.num_layers(reader)))


def rules(config: ModelConfig) -> list[Rule]:
    return weight_rules.decoder_rules(config, attention_rules)


def attention_rules(config: LatentAttentionConfig, name: str) -> list[Rule]:
    at = "layers.{layer}.mixer"
    first = "q_proj" if config.q_rank is None else "q_a_proj"
    kinds = ("weight", "bias") if config.bias else ("weight",)
    queries = config.q_rank or config.num_heads * (config.nope_dim + config.rope_dim)
    both = concat(queries, config.kv_rank + config.rope_dim)
    heads = (Split("outputs", "heads", config.nope_dim + config.rope_dim),)
    values = {"weight": (Split("inputs", "heads", config.value_dim),), "bias": ()}
    keys = (Split("outputs", "heads", config.nope_dim + config.value_dim),)
    # Latents are whole on every rank; queries that have none are shared out.
    own = (*heads, None) if config.q_rank is None else ()
    downs = tuple((f"{name}.{first}.{k}", f"{name}.kv_a_proj_with_mqa.{k}") for k in kinds)
    made = [Rule(f"{at}.down.{k}", pair, both, splits=own) for k, pair in zip(kinds, downs, strict=True)]
    made += [Rule(f"{at}.out.{k}", (f"{name}.o_proj.{k}",), splits=values[k]) for k in kinds]
    made += [
        Rule(f"{at}.kv_norm", (f"{name}.kv_a_layernorm.weight",)),
        Rule(f"{at}.kv_up", (f"{name}.kv_b_proj.weight",), Flat(), splits=keys),
    ]
    if config.q_rank is not None:
        made += [
            Rule(f"{at}.q_norm.weight", (f"{name}.q_a_layernorm.weight",)),
            Rule(f"{at}.q_up.weight", (f"{name}.q_b_proj.weight",), splits=heads),
        ]
    return made
