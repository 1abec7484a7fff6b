"""What families have in common: parsing of rotary embedding, dtype and layer lists, and the usual weight names.

A family file composes these; it says only what is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

from engine.models.config import (
    Activation,
    AttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from engine.models.reader import LARGEST_POSITION, ConfigError, Reader
from engine.quant.config import KEYS
from engine.weights.rules import Rule, SharedBehind, SharedBehindConcat, Split, Stack, StackConcat, concat

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
# Layers of a model, and experts of a layer: each has rules of its own.
MAX_PARTS = 1 << 12
DTYPES = ("float32", "bfloat16", "float16")

DType = Literal["float32", "bfloat16", "float16"]

# How ranks share gate and up, down, and what speaks tokens.
INNER_OUT, INNER_IN = Split("outputs", "inner"), Split("inputs", "inner")
BY_TOKEN = (Split("outputs", "vocabulary"),)


def rope(reader: Reader, head_dim: int, *, partial: bool = False, interleaved: bool = False) -> RopeConfig:
    """Rotary embedding, from `rope_theta` + `rope_scaling` or from `rope_parameters` (transformers 5).

    `partial` families may rotate a part of a head alone. Raises ConfigError for a rope type or parameter that is not
    implemented.
    """
    where, given = rope_values(reader)
    values = {"rope_theta": reader.positive("rope_theta", 10000.0), **given}
    outer = reader.optional(float, "partial_rotary_factor")
    if outer is not None:
        values.setdefault("partial_rotary_factor", outer)
    return scaled_rope(Reader(values, where), head_dim, max_position(reader), partial=partial, interleaved=interleaved)


def rope_values(reader: Reader) -> tuple[str, dict[str, Any]]:
    """What `rope_scaling` or `rope_parameters` holds, and where. Raises ConfigError when both hold something else."""
    given = {key: values for key in ("rope_scaling", "rope_parameters") if (values := reader.optional(dict, key))}
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ConfigError(f"{reader.where}: rope_scaling and rope_parameters say different things; keep one of them")
    for key, values in given.items():
        return f"{reader.where}: {key}", values
    return reader.where, {}


def scaled_rope(
    reader: Reader, head_dim: int, max_position: int, *, partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Rotary embedding from one object that holds all of it; `partial` as in `rope`."""
    named = {kind for key in ("rope_type", "type") if (kind := reader.optional(str, key)) is not None}
    if len(named) > 1:
        raise ConfigError(f"{reader.where} names two rope types: {', '.join(sorted(named))}; keep one")
    kind = named.pop() if named else "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{reader.where}: rope type {kind!r} is not implemented; implemented: {', '.join(ROPE_KINDS)}"
        )
    if not partial:
        reader.require("partial_rotary_factor", 1, default=1)
    rotary_dim = int(head_dim * reader.positive("partial_rotary_factor", 1.0))
    reader.check(
        rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim,
        f"{rotary_dim} of a head's {head_dim} channels are to be rotated, which must be an even number of them",
    )
    theta = reader.positive("rope_theta")
    factor = 1.0 if kind == "default" else reader.positive("factor")
    numbers: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        length = reader.size("original_max_position_embeddings", max_position, most=LARGEST_POSITION)
        numbers["original_max_position"] = length
    if kind == "llama3":
        low, high = reader.positive("low_freq_factor"), reader.positive("high_freq_factor")
        reader.check(low < high, f"high_freq_factor = {high} must be greater than low_freq_factor = {low}")
        numbers |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        reader.check(theta != 1.0, "rope_theta = 1 gives every channel the same wave, which YaRN cannot stretch")
        numbers["beta_fast"] = reader.positive("beta_fast", 32.0)
        numbers["beta_slow"] = reader.positive("beta_slow", 1.0)
        numbers["truncate"] = reader.read(bool, "truncate", True)
        numbers["attention_factor"] = _yarn_attention_factor(reader, factor)
    # DeepSeek and Qwen repeat these beside a scaling that does not use them.
    reader.skip("original_max_position_embeddings", "finetuned", "factor")
    # Time, height and width of a text token are the same position, however the channels are dealt out to them.
    reader.skip("mrope_section", "mrope_interleaved")
    reader.finish()
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        kind=cast("Literal['default', 'linear', 'llama3', 'yarn']", kind),
        factor=factor,
        **numbers,
    )


def _yarn_attention_factor(reader: Reader, factor: float) -> float:
    """Factor on cos and sin (YaRN, arXiv:2309.00071, eq. 22; the two-scale form is DeepSeek-V2's)."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = reader.positive("attention_factor", None)
    mscale, mscale_all_dim = reader.read(float, "mscale", 0.0), reader.read(float, "mscale_all_dim", 0.0)
    if given is not None:
        return given
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def max_position(reader: Reader) -> int:
    """Positions that the model was made for."""
    return reader.size("max_position_embeddings", most=LARGEST_POSITION)


def reachable_positions(reader: Reader, rotary: RopeConfig | None) -> int:
    """Positions that the model can be served with: YaRN stretches the original range, others say it all."""
    said = max_position(reader)
    if rotary is None or rotary.kind != "yarn":
        return said
    return min(max(said, int(rotary.original_max_position * rotary.factor)), LARGEST_POSITION)


def dtype(reader: Reader) -> DType | None:
    """The dtype the checkpoint was saved in, if the config says so."""
    said = [name for key in ("dtype", "torch_dtype") if (name := reader.optional(str, key)) is not None]
    if not said:
        return None
    name = said[0].removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"{reader.where}: dtype = {said[0]!r} is not implemented; implemented: {', '.join(DTYPES)}")
    return cast(DType, name)


def activation(reader: Reader, key: str = "hidden_act") -> Activation:
    return ACTIVATIONS[reader.require(key, *ACTIVATIONS)]


def attention(
    reader: Reader,
    *,
    rotary: RopeConfig | None = None,
    partial: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
) -> AttentionConfig:
    """Grouped-query attention as Llama and its kin write it. `rotary` None reads it from the config, `partial` as in
    `rope`."""
    heads, hidden = reader.size("num_attention_heads"), reader.size("hidden_size")
    groups = reader.size("num_key_value_heads", heads)
    reader.check(
        heads % groups == 0, f"num_attention_heads = {heads} must be a multiple of num_key_value_heads = {groups}"
    )
    whole = "head_dim" in reader or hidden % heads == 0
    reader.check(whole, f"hidden_size = {hidden} must be a multiple of num_attention_heads = {heads}")
    head_dim = reader.size("head_dim", hidden // heads)
    bias = reader.read(bool, "attention_bias", False)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(reader, head_dim, partial=partial) if rotary is None else rotary,
        qk_norm=qk_norm,
        bias=bias,
        output_bias=bias,
        window=window,
    )


def mlp(reader: Reader) -> MlpConfig:
    """Gated feed-forward part as Llama and its kin write it, without a bias."""
    reader.refuse("mlp_bias", "feed-forward parts of this family have no bias", False)
    return MlpConfig(intermediate=reader.size("intermediate_size"), activation=activation(reader))


def experts(reader: Reader, **own: Any) -> MoeConfig:
    """Routed experts. `own` are the fields of MoeConfig that a family reads by itself."""
    counts = ("num_experts", "n_routed_experts", "num_local_experts")  # releases of transformers differ
    said = {count for key in counts if (count := reader.size(key, None, most=MAX_PARTS)) is not None}
    if len(said) != 1:
        raise ConfigError(f"{reader.where} must give one of {', '.join(counts)}; it gives {len(said)} different values")
    made = MoeConfig(
        num_experts=said.pop(),
        top_k=reader.size("num_experts_per_tok"),
        intermediate=reader.size("moe_intermediate_size"),
        activation=activation(reader),
        **own,
    )
    count, groups, chosen = made.num_experts, made.num_groups, made.top_groups
    reader.check(count % groups == 0, f"{count} experts cannot be shared out among n_group = {groups}")
    reader.check(chosen <= groups, f"topk_group = {chosen} must be at most n_group = {groups}")
    few = made.group_score == "top2" and count < 2 * groups
    reader.check(not few, f"a group is worth its two best experts, and n_group = {groups} of {count} have fewer")
    most = count // groups * chosen
    reader.check(
        made.top_k <= most, f"num_experts_per_tok = {made.top_k} must be at most {most}, the experts to choose from"
    )
    return made


def full_attention_only(reader: Reader) -> None:
    """Refuse sliding windows, however the config spells them, where they are not part of the family."""
    reader.refuse("use_sliding_window", "this family is served with full attention only", False)
    reader.skip("max_window_layers")
    if "use_sliding_window" in reader:
        reader.skip("sliding_window")  # read by the model only when use_sliding_window is true
    else:
        reader.refuse("sliding_window", "this family is served with full attention only")
    layer_types(reader, ("full_attention",))


def text(reader: Reader) -> Reader | None:
    """The text model inside a larger one, or None when there is none. What the larger one says of both holds."""
    reader.skip(*KEYS)
    return reader.child("text_config", "dtype", "torch_dtype", "eos_token_id")


def decoder(reader: Reader, family: str, layers: tuple[LayerConfig, ...], rotary: RopeConfig | None) -> ModelConfig:
    """The whole of a plain decoder around its layers."""
    reader.skip(*KEYS)
    vocab_size = reader.size("vocab_size", most=LARGEST_POSITION)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden=reader.size("hidden_size"),
        layers=layers,
        norm=NormConfig(eps=reader.positive("rms_norm_eps")),
        max_position=reachable_positions(reader, rotary),
        tied=reader.read(bool, "tie_word_embeddings", False),
        dtype=dtype(reader),
        eos_ids=reader.token_ids("eos_token_id", vocab_size),
    )


def layer_types(reader: Reader, kinds: tuple[str, ...], every: int = 1) -> list[str]:
    """The kind of each layer: listed, or the last of `kinds` in each `every`-th layer and the first elsewhere.

    Raises ConfigError for a kind that is none of `kinds` and for a list of another length.
    """
    count = num_layers(reader)
    listed = reader.items(str, "layer_types")
    if listed is None:
        return [kinds[-1] if (i + 1) % every == 0 else kinds[0] for i in range(count)]
    unknown = sorted(set(listed) - set(kinds))
    reader.check(
        not unknown,
        f"layer_types holds {', '.join(unknown)}, not implemented here; implemented: {', '.join(kinds)}",
    )
    reader.check(len(listed) == count, f"layer_types holds {len(listed)} kinds for num_hidden_layers = {count}")
    return listed


def num_layers(reader: Reader) -> int:
    return reader.size("num_hidden_layers", most=MAX_PARTS)


def attention_rules(config: AttentionConfig, name: str = "model.layers.{layer}.self_attn") -> list[Rule]:
    """q, k and v become one matrix; `{layer}` is filled in later."""
    at = "layers.{layer}.mixer"
    projections = tuple(f"{name}.{part}_proj" for part in "qkv")
    heads = concat(*(count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)))
    # A gate stands beside each query.
    queries = Split("outputs", "heads", config.head_dim * (1 + config.gated))
    keys = Split("outputs", "groups", config.head_dim)
    three = (queries, keys, keys)
    out = (Split("inputs", "heads", config.head_dim),)
    rules = [
        Rule(f"{at}.qkv.weight", tuple(f"{p}.weight" for p in projections), heads, splits=three),
        Rule(f"{at}.out.weight", (f"{name}.o_proj.weight",), splits=out),
    ]
    if config.bias:
        rules.append(Rule(f"{at}.qkv.bias", tuple(f"{p}.bias" for p in projections), heads, splits=three))
    if config.output_bias:
        rules.append(Rule(f"{at}.out.bias", (f"{name}.o_proj.bias",)))
    if config.qk_norm:
        rules += [Rule(f"{at}.{part}_norm", (f"{name}.{part}_norm.weight",)) for part in "qk"]
    return rules


def mlp_rules(config: MlpConfig, name: str = "model.layers.{layer}.mlp") -> list[Rule]:
    """gate and up become one matrix."""
    at = "layers.{layer}.ffn"
    kinds, both = ("weight", "bias") if config.bias else ("weight",), concat(config.intermediate, config.intermediate)
    rules = [
        Rule(f"{at}.gate_up.{kind}", (f"{name}.gate_proj.{kind}", f"{name}.up_proj.{kind}"), both, splits=(INNER_OUT,))
        for kind in kinds
    ]
    # Ranks share the products, and not the bias behind them.
    downs = {"weight": (INNER_IN,), "bias": ()}
    return rules + [Rule(f"{at}.down.{k}", (f"{name}.down_proj.{k}",), splits=downs[k]) for k in kinds]


def norm_rules(sandwich: bool = False, name: str = "model.layers.{layer}") -> list[Rule]:
    """The norms of a layer, under Llama's names or, with `sandwich`, Gemma's."""
    names = {"mixer_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if sandwich:
        names = {
            "mixer_norm": "input_layernorm",
            "mixer_out_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_out_norm": "post_feedforward_layernorm",
        }
    return [Rule(f"layers.{{layer}}.{ours}.weight", (f"{name}.{theirs}.weight",)) for ours, theirs in names.items()]


def moe_rules(config: MoeConfig, name: str = "model.layers.{layer}.mlp") -> list[Rule]:
    """Router and experts."""
    at = "layers.{layer}.ffn"
    rules = [Rule(f"{at}.router", (f"{name}.gate.weight",)), *expert_rules(config, name)]
    if config.correction_bias:
        rules.append(Rule(f"{at}.correction", (f"{name}.gate.e_score_correction_bias",)))
    return rules


def expert_rules(
    config: MoeConfig, name: str, parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> list[Rule]:
    """Each expert's gate and up become one matrix, and all experts one tensor, the shared ones last unless they stand
    apart. `parts` are the names of gate, up and down."""
    gate, up, down = parts
    experts = [f"{name}.experts.{e}" for e in range(config.num_experts)]
    behind = [f"{name}.shared_experts"] if config.num_behind else []
    pairs = tuple(f"{expert}.{part}.weight" for expert in experts + behind for part in (gate, up))
    downs = tuple(f"{expert}.{down}.weight" for expert in experts + behind)
    at = "layers.{layer}.ffn"
    # Shared experts are one matrix, of which a rank takes a run as wide as its shares of all of them.
    own = [config.num_experts * 2 * (INNER_OUT,), config.num_experts * (INNER_IN,)]
    last = [2 * (replace(INNER_OUT, width=config.num_shared),), (replace(INNER_IN, width=config.num_shared),)]
    ups_split, downs_split = (a + b if behind else a for a, b in zip(own, last, strict=True))
    rules = [
        Rule(f"{at}.gate_up", pairs, SharedBehindConcat() if behind else StackConcat(), splits=ups_split),
        Rule(f"{at}.down", downs, SharedBehind() if behind else Stack(), splits=downs_split),
    ]
    if config.num_shared and config.apart:
        inner = config.num_shared * config.intermediate
        both = (f"{name}.shared_experts.{gate}.weight", f"{name}.shared_experts.{up}.weight")
        rules += [
            Rule(f"{at}.shared.gate_up.weight", both, concat(inner, inner), splits=last[0]),
            Rule(f"{at}.shared.down.weight", (f"{name}.shared_experts.{down}.weight",), splits=last[1]),
        ]
    return rules


def with_shared_apart(config: ModelConfig) -> ModelConfig:
    """The same model, whose shared experts stand in no table with the others."""
    parts = [
        replace(layer, ffn=replace(layer.ffn, apart=True)) if isinstance(layer.ffn, MoeConfig) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(parts))


def outer_rules(config: ModelConfig) -> list[Rule]:
    """Embedding, final norm and, when it is not the embedding again, the head."""
    rules = [
        Rule("embed.weight", (f"{config.prefix}.embed_tokens.weight",), splits=BY_TOKEN),
        Rule("norm.weight", (f"{config.prefix}.norm.weight",)),
    ]
    return rules if config.tied else [*rules, Rule("head.weight", ("lm_head.weight",), splits=BY_TOKEN)]


def decoder_rules(
    config: ModelConfig, mixer_rules: Callable[..., list[Rule]] = attention_rules, mixer_name: str = "self_attn"
) -> list[Rule]:
    """Rules of a whole model; `mixer_rules(config, name)` are those of a layer's mixer, `name` that of its tensors."""
    rules, name = outer_rules(config), f"{config.prefix}.layers.{{layer}}"
    for index, layer in enumerate(config.layers):
        ffn = moe_rules if isinstance(layer.ffn, MoeConfig) else mlp_rules
        templates = [
            *norm_rules(layer.sandwich, name),
            *mixer_rules(layer.mixer, f"{name}.{mixer_name}"),
            *ffn(layer.ffn, f"{name}.mlp"),  # type: ignore[arg-type]
        ]
        rules += [rule.at(index) for rule in templates]
    return rules
