"""DeepSeek-V4 (2026): a window beside compressed entries, hyper-connections, and experts that the first layers choose
by token id and the others by corrected scores.

A compress ratio of 0 is a window alone, of 4 overlapping windows of 4 with an indexer, of 128 all entries of 128.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models import common
from engine.models.config import (
    HyperConfig,
    IndexerConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    RopeConfig,
    SparseAttentionConfig,
)
from engine.models.reader import ConfigError, Reader
from engine.weights.rules import Rule, concat, flat, stack, stack_concat

KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
FFN_KINDS = ("hash_moe", "moe")


def parse(reader: Reader) -> ModelConfig:
    main, compressed = _ropes(reader)
    mixers, experts = _mixers(reader, main, compressed), _experts(reader)
    count = common.num_layers(reader)
    routed = reader.optional(list, "mlp_layer_types")
    if routed is None:
        hashed = reader.read(int, "num_hash_layers")
        routed = [FFN_KINDS[i >= hashed] for i in range(count)]
    reader.skip("num_hash_layers")
    if set(routed) - set(FFN_KINDS) or len(routed) < count:
        raise ConfigError(f"{reader.where}: mlp_layer_types = {routed!r} is not implemented for {count} layers")
    by_id = replace(experts, hashed=True, correction_bias=False)
    layers = tuple(
        LayerConfig(mixers[ratio], by_id if kind == "hash_moe" else experts)
        for ratio, kind in zip(_ratios(reader, count), routed, strict=False)
    )
    reader.skip("num_nextn_predict_layers", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise")
    hyper = HyperConfig(
        reader.read(int, "hc_mult"), reader.read(int, "hc_sinkhorn_iters"), reader.read(float, "hc_eps")
    )
    return replace(common.decoder(reader, "deepseek_v4", layers, compressed), hyper=hyper)


def _ropes(reader: Reader) -> tuple[RopeConfig, RopeConfig]:
    """Windows alone have a plain base; layers with entries another, stretched by YaRN without its attention factor."""
    head_dim = reader.read(int, "head_dim")
    part = reader.optional(float, "partial_rotary_factor") or reader.read(int, "qk_rope_head_dim") / head_dim
    reader.skip("qk_rope_head_dim")
    nested = reader.optional(dict, "rope_parameters") or {}
    scaling = nested.get("compress") or reader.optional(dict, "rope_scaling") or {}
    theta, length = reader.read(float, "compress_rope_theta"), reader.read(int, "max_position_embeddings")
    values = {"rope_theta": theta, "partial_rotary_factor": part, **scaling}
    if "yarn" in (values.get("rope_type"), values.get("type")):
        values.setdefault("attention_factor", 1.0)
    compressed = common.scaled_rope(Reader(values, f"{reader.where}: rope of entries"), head_dim, length, True)
    return RopeConfig(reader.read(float, "rope_theta"), compressed.rotary_dim, interleaved=True), compressed


def _mixers(reader: Reader, main: RopeConfig, compressed: RopeConfig) -> dict[int, SparseAttentionConfig]:
    """The layer kinds by their compress ratio."""
    reader.require("num_key_value_heads", 1)
    reader.require("attention_bias", False, default=False)
    rates = {kind: ratio for kind, ratio in KINDS.items() if ratio}
    reader.require("compress_rates", rates, default=rates)
    head_dim = reader.read(int, "head_dim")
    alone = SparseAttentionConfig(
        num_heads=reader.read(int, "num_attention_heads"),
        head_dim=head_dim,
        q_rank=reader.read(int, "q_lora_rank"),
        scale=head_dim**-0.5,
        rope=main,
        window=reader.read(int, "sliding_window"),
        out_groups=reader.read(int, "o_groups"),
        out_rank=reader.read(int, "o_lora_rank"),
    )
    indexer = IndexerConfig(
        reader.read(int, "index_n_heads"), reader.read(int, "index_head_dim"), reader.read(int, "index_topk")
    )
    if indexer.head_dim == head_dim:
        raise ConfigError(f"{reader.where}: index_head_dim = {head_dim} equals head_dim, which is not implemented")
    return {
        0: alone,
        4: replace(alone, rope=compressed, ratio=4, overlap=True, indexer=indexer),
        128: replace(alone, rope=compressed, ratio=128),
    }


def _ratios(reader: Reader, count: int) -> list[int]:
    """The compress ratio of each layer; a checkpoint's list may go on with the layers that predict further tokens."""
    given = reader.optional(list, "compress_ratios")
    ratios = given or [KINDS.get(kind, kind) for kind in reader.read(list, "layer_types")]
    unknown = [ratio for ratio in ratios if ratio not in KINDS.values()]
    if unknown or len(ratios) < count:
        raise ConfigError(
            f"{reader.where}: {len(ratios)} layer kinds, {unknown} among them, do not describe {count} layers; "
            f"implemented kinds and their compress ratios: {KINDS}"
        )
    reader.skip("layer_types")
    return ratios[:count]


def _experts(reader: Reader) -> MoeConfig:
    reader.require("topk_method", "noaux_tc", default="noaux_tc")
    reader.require("norm_topk_prob", True, default=True)
    reader.require("mlp_bias", False, default=False)
    inner = reader.read(int, "moe_intermediate_size")
    return MoeConfig(
        num_experts=common.num_experts(reader, "n_routed_experts", "num_local_experts"),
        top_k=reader.read(int, "num_experts_per_tok"),
        intermediate=inner,
        score=reader.require("scoring_func", "sqrtsoftplus", "sigmoid"),
        correction_bias=True,
        scale=reader.read(float, "routed_scaling_factor"),
        shared_intermediate=inner * reader.read(int, "n_shared_experts"),
        activation=common.activation(reader),
        limit=reader.read(float, "swiglu_limit"),
    )


def rules(config: ModelConfig) -> list[Rule]:
    made = common.outer_rules(config)
    made += [Rule(f"hyper_head.{part}", (f"model.hc_head.hc_{part}",)) for part in ("fn", "base", "scale")]
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.mixer, SparseAttentionConfig)
        assert isinstance(layer.ffn, MoeConfig)
        templates = _layer_rules() + _mixer_rules(layer.mixer) + _ffn_rules(layer.ffn)
        made += [rule.at(index) for rule in templates]
    return made


def _layer_rules() -> list[Rule]:
    at, name = "layers.{layer}", "model.layers.{layer}"
    pairs = (("mixer", "attn"), ("ffn", "ffn"))
    made = [Rule(f"{at}.{ours}_norm.weight", (f"{name}.{theirs}_norm.weight",)) for ours, theirs in pairs]
    return made + [
        Rule(f"{at}.{ours}_hyper.{part}", (f"{name}.hc_{theirs}_{part}",))
        for ours, theirs in pairs
        for part in ("fn", "base", "scale")
    ]


def _mixer_rules(config: SparseAttentionConfig) -> list[Rule]:
    at, name = "layers.{layer}.mixer", "model.layers.{layer}.attn"
    down, q_up = ["wq_a", "wkv"], ["wq_b"]
    made = []
    for ours, theirs in (("compressor", "compressor"), ("index_compressor", "indexer.compressor")):
        if config.ratio and (ours == "compressor" or config.indexer is not None):
            down += [f"{theirs}.wkv", f"{theirs}.wgate"]
            made += [
                Rule(f"{at}.{ours}.bias", (f"{name}.{theirs}.ape",)),
                Rule(f"{at}.{ours}.norm", (f"{name}.{theirs}.norm.weight",)),
            ]
    if config.indexer is not None:
        down.append("indexer.weights_proj")
        q_up.append("indexer.wq_b")
    return [
        *made,
        Rule(f"{at}.down.weight", tuple(f"{name}.{part}.weight" for part in down), concat),
        Rule(f"{at}.q_up.weight", tuple(f"{name}.{part}.weight" for part in q_up), concat),
        Rule(f"{at}.q_norm.weight", (f"{name}.q_norm.weight",)),
        Rule(f"{at}.kv_norm", (f"{name}.norm.weight",)),
        Rule(f"{at}.sinks", (f"{name}.attn_sink",)),
        Rule(f"{at}.out_down", (f"{name}.wo_a.weight",), flat),
        Rule(f"{at}.out.weight", (f"{name}.wo_b.weight",)),
    ]


def _ffn_rules(config: MoeConfig) -> list[Rule]:
    at, name = "layers.{layer}.ffn", "model.layers.{layer}.ffn"
    experts = [f"{name}.experts.{e}" for e in range(config.num_experts)]
    chosen = ("table", "gate.tid2eid") if config.hashed else ("correction", "gate.bias")
    return [
        Rule(f"{at}.router", (f"{name}.gate.weight",)),
        Rule(f"{at}.{chosen[0]}", (f"{name}.{chosen[1]}",)),
        Rule(f"{at}.gate_up", tuple(f"{e}.{w}.weight" for e in experts for w in ("w1", "w3")), stack_concat),
        Rule(f"{at}.down", tuple(f"{e}.w2.weight" for e in experts), stack),
        Rule(f"{at}.shared.gate_up.weight", tuple(f"{name}.shared_experts.{w}.weight" for w in ("w1", "w3")), concat),
        Rule(f"{at}.shared.down.weight", (f"{name}.shared_experts.w2.weight",)),
    ]


def unused(config: ModelConfig) -> tuple[str, ...]:
    """Layers that predict further tokens at once; decoding does without them."""
    return ("mtp.*", "model.mtp.*")


def rename(name: str) -> str:
    """DeepSeek's own checkpoints name the outer tensors otherwise than those that transformers saves."""
    outer = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight"}
    if name == "head.weight":
        return "lm_head.weight"
    if name in outer:
        return f"model.{outer[name]}"
    if name.startswith("hc_head_"):
        return name.replace("hc_head_", "model.hc_head.hc_")
    name = f"model.{name}" if name.startswith("layers.") else name
    return name.replace(".attn.kv_norm.", ".attn.norm.")
