"""DeepSeek-V4 (2026): a window beside compressed entries, hyper-connections, and experts that the first layers choose
by token id and the others by corrected scores.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models import compressed, mtp, parts, weight_rules
from engine.models.config import (
    HyperConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    SparseAttentionConfig,
)
from engine.models.reader import Reader, shown
from engine.weights.rules import Rule

FFN_KINDS = ("hash_moe", "moe")


def parse(reader: Reader) -> ModelConfig:
    alone, stretched = compressed.ropes(reader)
    mixers, experts = compressed.mixers(reader, alone, stretched), _experts(reader)
    count = parts.num_layers(reader)
    routed = reader.items(str, "mlp_layer_types")
    if routed is None:
        hashed = reader.size("num_hash_layers", least=0)
        routed = [FFN_KINDS[i >= hashed] for i in range(count)]
    reader.skip("num_hash_layers")
    fits = len(routed) >= count and set(routed) <= set(FFN_KINDS)
    reader.check(fits, f"mlp_layer_types = {shown(routed)} must name {count} layers' kinds, of {', '.join(FFN_KINDS)}")
    by_id = replace(experts, hashed=True, correction_bias=False)
    layers = tuple(
        LayerConfig(mixers[ratio], by_id if kind == "hash_moe" else experts)
        for ratio, kind in zip(compressed.ratios(reader, count), routed, strict=False)
    )
    reader.skip("router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
    hyper = HyperConfig(
        reader.size("hc_mult", most=64), reader.size("hc_sinkhorn_iters", most=1000), reader.positive("hc_eps")
    )
    return replace(
        parts.decoder(reader, "deepseek_v4", layers, stretched), hyper=hyper, num_mtp_modules=_num_mtp_modules(reader)
    )


def _num_mtp_modules(reader: Reader) -> int:
    """Modules that predict further tokens. DSpark's (arXiv:2607.05147), which draft in another way, are not built."""
    count = reader.size("num_nextn_predict_layers", 0, least=0)
    dspark = ("dspark_target_layer_ids", "dspark_markov_rank", "dspark_block_size")
    other = any(key in reader for key in dspark)
    reader.skip(*dspark)
    return 0 if other else count


def _experts(reader: Reader) -> MoeConfig:
    # Tensors say how experts are stored (`engine.quant`).
    reader.require("expert_dtype", "fp4", "fp8", "bf16", default=None) if "expert_dtype" in reader else None
    reader.require("topk_method", "noaux_tc", default="noaux_tc")
    reader.require("norm_topk_prob", True, default=True)
    reader.require("mlp_bias", False, default=False)
    return parts.experts(
        reader,
        score=reader.require("scoring_func", "sqrtsoftplus", "sigmoid"),
        correction_bias=True,
        scale=reader.positive("routed_scaling_factor"),
        num_shared=reader.require("n_shared_experts", 1),
        limit=reader.positive("swiglu_limit"),
    )


def rules(config: ModelConfig) -> list[Rule]:
    made = weight_rules.outer_rules(config)
    made += [Rule(f"hyper_head.{part}", (f"model.hc_head.hc_{part}",)) for part in ("fn", "base", "scale")]
    for index, layer in enumerate(config.layers):
        made += [rule.at(index) for rule in _layer_rules(layer, "model.layers.{layer}")]
    return made


def mtp_config(config: ModelConfig) -> mtp.MtpConfig | None:
    """A layer with a window alone, whose experts are chosen by corrected scores."""
    layer = next((layer for layer in config.layers if not _mixer(layer).ratio), None)
    if not config.num_mtp_modules or layer is None:
        return None
    assert isinstance(layer.ffn, MoeConfig)
    layer = replace(layer, ffn=replace(layer.ffn, hashed=False, correction_bias=True))
    name = "mtp.0"
    other = {"embed_norm": "enorm", "hidden_norm": "hnorm", "norm": "norm"}
    other |= {"embed_project": "e_proj", "hidden_project": "h_proj"}
    named = mtp.rules(_layer_rules(layer, name), **{ours: f"{name}.{theirs}" for ours, theirs in other.items()})
    hyper = (Rule(f"hyper_head.{part}", (f"{name}.hc_head_{part}",)) for part in ("fn", "base", "scale"))
    outer = {"model.embed_tokens.weight": f"{name}.emb.tok_emb.weight", "lm_head.weight": f"{name}.head.weight"}
    return mtp.MtpConfig(layer, f"{name}.", False, (*named, *hyper), outer)


def _mixer(layer: LayerConfig) -> SparseAttentionConfig:
    assert isinstance(layer.mixer, SparseAttentionConfig)
    return layer.mixer


def _layer_rules(layer: LayerConfig, name: str) -> list[Rule]:
    """name: of the layer in the checkpoint."""
    assert isinstance(layer.ffn, MoeConfig)
    return [
        *_residual_rules(name),
        *compressed.attention_rules(_mixer(layer), f"{name}.attn"),
        *_ffn_rules(layer.ffn, f"{name}.ffn"),
    ]


def _residual_rules(name: str) -> list[Rule]:
    at = "layers.{layer}"
    pairs = (("mixer", "attn"), ("ffn", "ffn"))
    made = [Rule(f"{at}.{ours}_norm.weight", (f"{name}.{theirs}_norm.weight",)) for ours, theirs in pairs]
    return made + [
        Rule(f"{at}.{ours}_hyper.{part}", (f"{name}.hc_{theirs}_{part}",))
        for ours, theirs in pairs
        for part in ("fn", "base", "scale")
    ]


def _ffn_rules(config: MoeConfig, name: str) -> list[Rule]:
    at = "layers.{layer}.ffn"
    chosen = ("table", "gate.tid2eid") if config.hashed else ("correction", "gate.bias")
    return [
        Rule(f"{at}.router", (f"{name}.gate.weight",)),
        Rule(f"{at}.{chosen[0]}", (f"{name}.{chosen[1]}",)),
        *weight_rules.expert_rules(config, name, ("w1", "w3", "w2")),
    ]


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Layers that predict further tokens at once; decoding does without them."""
    return ("mtp.*",)


def rename(name: str) -> str:
    """DeepSeek's own checkpoints name the outer tensors otherwise than those that transformers saves."""
    name = name.removeprefix("model.") if name.startswith("model.mtp.") else name
    outer = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    if name == "head.weight":
        return "lm_head.weight"
    if name in outer:
        return f"model.{outer[name]}"
    if name.startswith("hc_head_"):
        return name.replace("hc_head_", "model.hc_head.hc_")
    name = f"model.{name}" if name.startswith("layers.") else name
    return name.replace(".attn.kv_norm.", ".attn.norm.")
