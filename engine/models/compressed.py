"""What families with compressed attention have in common: its config by layer kind, and its weight names.

A compress ratio of 0 is a window alone, of 4 overlapping windows of 4 with an indexer, of 128 all entries of 128.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models import rope
from engine.models.config import IndexerConfig, RopeConfig, SparseAttentionConfig
from engine.models.reader import LARGEST_POSITION, ConfigError, Reader, shown
from engine.weights.rules import Flat, Rule, Split, concat

KINDS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def ropes(reader: Reader) -> tuple[RopeConfig, RopeConfig]:
    """Windows alone have a plain base; layers with entries another, stretched by YaRN without its attention factor."""
    head_dim, length = reader.size("head_dim"), rope.max_position(reader)
    given = reader.positive("partial_rotary_factor", None)
    if given is None:
        given = reader.size("qk_rope_head_dim") / head_dim
    reader.skip("qk_rope_head_dim")
    part = {"partial_rotary_factor": given}
    plain, theta = reader.positive("rope_theta"), reader.positive("compress_rope_theta")
    where, values = rope.values(reader)
    nested = Reader(values, where)
    if "main" in nested and "compress" in nested:
        main, entries = ({**part, **(nested.optional(dict, key) or {})} for key in ("main", "compress"))
        nested.finish()
    else:
        same = values.get("rope_theta", plain) == plain
        reader.check(same, "rope_theta and that of rope_parameters say different things; keep one of them")
        main, entries = {"rope_theta": plain, **part}, {**part, **values, "rope_theta": theta}
        if "yarn" in (entries.get("rope_type"), entries.get("type")):
            entries.setdefault("attention_factor", 1.0)
    both = Reader(main, f"{where} of windows"), Reader(entries, f"{where} of entries")
    for part_of in both:
        part_of.require("truncate", True, default=True)  # transformers overlooks it where there are two
    one, other = (rope.scaled(r, head_dim, length, partial=True, interleaved=True) for r in both)
    reader.check(one.rotary_dim == other.rotary_dim, "windows and entries must rotate the same part of a head")
    return one, other


def mixers(reader: Reader, main: RopeConfig, compressed: RopeConfig) -> dict[int, SparseAttentionConfig]:
    """The layer kinds by their compress ratio."""
    reader.require("num_key_value_heads", 1)
    reader.require("attention_bias", False, default=False)
    rates = {kind: ratio for kind, ratio in KINDS.items() if ratio}
    reader.require("compress_rates", rates, default=rates)
    head_dim, heads, groups = (reader.size(key) for key in ("head_dim", "num_attention_heads", "o_groups"))
    reader.check(heads % groups == 0, f"num_attention_heads = {heads} must be a multiple of o_groups = {groups}")
    alone = SparseAttentionConfig(
        num_heads=heads,
        head_dim=head_dim,
        q_rank=reader.size("q_lora_rank"),
        scale=head_dim**-0.5,
        rope=main,
        window=reader.size("sliding_window", most=LARGEST_POSITION),
        out_groups=groups,
        out_rank=reader.size("o_lora_rank"),
    )
    indexer = IndexerConfig(reader.size("index_n_heads"), reader.size("index_head_dim"), reader.size("index_topk"))
    rotary = compressed.rotary_dim
    reader.check(indexer.head_dim != head_dim, f"index_head_dim = {head_dim} equals head_dim, which is not implemented")
    reader.check(
        indexer.head_dim >= rotary, f"index_head_dim = {indexer.head_dim} has no room for {rotary} rotated channels"
    )
    return {
        0: alone,
        4: replace(alone, rope=compressed, ratio=4, overlap=True, indexer=indexer),
        128: replace(alone, rope=compressed, ratio=128),
    }


def ratios(reader: Reader, count: int) -> list[int]:
    """The compress ratio of each layer; a checkpoint's list may go on with the layers that predict further tokens."""
    kinds, listed = reader.items(str, "layer_types"), reader.items(int, "compress_ratios")
    if kinds is None and listed is None:
        raise ConfigError(f"{reader.where} lacks compress_ratios or layer_types, which this model needs")
    named = [KINDS.get(kind, -1) for kind in kinds or ()] or listed or []
    fits = len(named) >= count and set(named) <= set(KINDS.values())
    same = kinds is None or listed is None or named[:count] == listed[:count]
    reader.check(
        fits and same,
        f"layer_types = {shown(kinds)} and compress_ratios = {shown(listed)} must describe num_hidden_layers = {count} "
        f"layers, alike where both do; implemented kinds and their compress ratios: {KINDS}",
    )
    return named[:count]


def attention_rules(config: SparseAttentionConfig, name: str) -> list[Rule]:
    """name: of the mixer in the checkpoint."""
    at, index = "layers.{layer}.mixer", config.indexer
    # A source and how many rows it has.
    down, q_up = {"wq_a": config.q_rank, "wkv": config.head_dim}, {"wq_b": config.num_heads * config.head_dim}
    beside: dict[str, int] = {}
    made = []
    for ours, theirs, dim in (
        ("compressor", "compressor", config.head_dim if config.ratio else 0),
        ("index_compressor", "indexer.compressor", 0 if index is None else index.head_dim),
    ):
        if dim:
            beside |= {f"{theirs}.{part}": (1 + config.overlap) * dim for part in ("wkv", "wgate")}
            made += [
                Rule(f"{at}.{ours}.bias", (f"{name}.{theirs}.ape",)),
                Rule(f"{at}.{ours}.norm", (f"{name}.{theirs}.norm.weight",)),
            ]
    if index is not None:
        beside["indexer.weights_proj"] = index.num_heads
        q_up["indexer.wq_b"] = index.num_heads * index.head_dim
    if beside:
        sources = tuple(f"{name}.{part}.weight" for part in beside)
        made.append(Rule(f"{at}.beside.weight", sources, concat(*beside.values())))
    # Latents and what the indexer chooses by are whole on every rank.
    heads = Split("outputs", "heads", config.head_dim)
    return [
        *made,
        Rule(f"{at}.down.weight", tuple(f"{name}.{part}.weight" for part in down), concat(*down.values())),
        Rule(
            f"{at}.q_up.weight",
            tuple(f"{name}.{part}.weight" for part in q_up),
            concat(*q_up.values()),
            splits=(heads, None)[: len(q_up)],
        ),
        Rule(f"{at}.q_norm.weight", (f"{name}.q_norm.weight",)),
        Rule(f"{at}.kv_norm", (f"{name}.norm.weight",)),
        Rule(f"{at}.sinks", (f"{name}.attn_sink",), splits=(Split("outputs", "heads"),)),
        Rule(
            f"{at}.out_down",
            (f"{name}.wo_a.weight",),
            Flat(),
            splits=(Split("outputs", "groups", config.out_rank),),
        ),
        Rule(f"{at}.out.weight", (f"{name}.wo_b.weight",), splits=(Split("inputs", "groups", config.out_rank),)),
    ]
