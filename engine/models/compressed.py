"""What families with compressed attention have in common: its config by layer kind, and its weight names.

A compress ratio of 0 is a window alone, of 4 overlapping windows of 4 with an indexer, of 128 all entries of 128.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models import common
from engine.models.config import IndexerConfig, RopeConfig, SparseAttentionConfig
from engine.models.reader import ConfigError, Reader
from engine.weights.rules import Rule, concat, flat

KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def ropes(reader: Reader) -> tuple[RopeConfig, RopeConfig]:
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


def mixers(reader: Reader, main: RopeConfig, compressed: RopeConfig) -> dict[int, SparseAttentionConfig]:
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


def ratios(reader: Reader, count: int) -> list[int]:
    """The compress ratio of each layer; a checkpoint's list may go on with the layers that predict further tokens."""
    given = reader.optional(list, "compress_ratios")
    listed = given or [KINDS.get(kind, kind) for kind in reader.read(list, "layer_types")]
    unknown = [ratio for ratio in listed if ratio not in KINDS.values()]
    if unknown or len(listed) < count:
        raise ConfigError(
            f"{reader.where}: {len(listed)} layer kinds, {unknown} among them, do not describe {count} layers; "
            f"implemented kinds and their compress ratios: {KINDS}"
        )
    reader.skip("layer_types")
    return listed[:count]


def attention_rules(config: SparseAttentionConfig) -> list[Rule]:
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
