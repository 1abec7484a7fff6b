"""What families have in common: parsing of rotary embedding, dtype and layer lists, and the usual weight names.

A family file composes these; it says only what is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
from engine.models.reader import ConfigError, Reader
from engine.weights.rules import Rule, concat, shared_behind, shared_behind_concat, stack, stack_concat

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

DType = Literal["float32", "bfloat16", "float16"]


def rope(reader: Reader, head_dim: int, *, layer_type: str | None = None, interleaved: bool = False) -> RopeConfig:
    """Rotary embedding, from `rope_theta` + `rope_scaling` or from `rope_parameters` (transformers 5).

    `layer_type` picks one entry where rope_parameters holds one a layer type.
    Raises ConfigError for a rope type or parameter that is not implemented.
    """
    values: dict[str, Any] = {"rope_theta": reader.read(float, "rope_theta", 10000.0)}
    values["partial_rotary_factor"] = reader.read(float, "partial_rotary_factor", 1.0)
    where = f"{reader.where}: rope_scaling"
    values.update(reader.optional(dict, "rope_scaling") or {})
    parameters = reader.optional(dict, "rope_parameters") or {}
    if parameters:
        where = f"{reader.where}: rope_parameters"
        if layer_type is not None and layer_type in parameters:
            where, parameters = f"{where}: {layer_type}", parameters[layer_type]
        values.update(parameters)
    return scaled_rope(Reader(values, where), head_dim, reader.read(int, "max_position_embeddings"), interleaved)


def scaled_rope(reader: Reader, head_dim: int, max_position: int, interleaved: bool) -> RopeConfig:
    """Rotary embedding from one object that holds all of it."""
    named = {kind for key in ("rope_type", "type") if (kind := reader.optional(str, key)) is not None}
    if len(named) > 1:
        raise ConfigError(f"{reader.where} names two rope types: {', '.join(sorted(named))}; keep one")
    kind = named.pop() if named else "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{reader.where}: rope type {kind!r} is not implemented; implemented: {', '.join(ROPE_KINDS)}"
        )
    theta = reader.read(float, "rope_theta")
    rotary_dim = int(head_dim * reader.read(float, "partial_rotary_factor"))
    factor = 1.0 if kind == "default" else reader.read(float, "factor")
    numbers: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        numbers["original_max_position"] = reader.read(int, "original_max_position_embeddings", max_position)
    if kind == "llama3":
        numbers["low_freq_factor"] = reader.read(float, "low_freq_factor")
        numbers["high_freq_factor"] = reader.read(float, "high_freq_factor")
    if kind == "yarn":
        numbers["beta_fast"] = reader.read(float, "beta_fast", 32.0)
        numbers["beta_slow"] = reader.read(float, "beta_slow", 1.0)
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

    given = reader.optional(float, "attention_factor")
    mscale, mscale_all_dim = reader.read(float, "mscale", 0.0), reader.read(float, "mscale_all_dim", 0.0)
    if given is not None:
        return given
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def max_position(reader: Reader, scaled: RopeConfig) -> int:
    """Positions that the model is meant for: YaRN stretches the original range, others say it all."""
    said = reader.read(int, "max_position_embeddings")
    return max(said, int(scaled.original_max_position * scaled.factor)) if scaled.kind == "yarn" else said


def dtype(reader: Reader) -> DType:
    """The dtype the checkpoint was saved in."""
    said = reader.optional(str, "dtype") or reader.optional(str, "torch_dtype") or "float32"
    name = said.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"{reader.where}: dtype = {said!r} is not implemented; implemented: {', '.join(DTYPES)}")
    return cast(DType, name)


def activation(reader: Reader, key: str = "hidden_act") -> Activation:
    return ACTIVATIONS[reader.require(key, *ACTIVATIONS)]


def attention(
    reader: Reader, *, qk_norm: bool = False, window: int | None = None, rotary: RopeConfig | None = None
) -> AttentionConfig:
    """Grouped-query attention as Llama and its kin write it. `rotary` None reads it from the config."""
    heads = reader.read(int, "num_attention_heads")
    head_dim = reader.read(int, "head_dim", reader.read(int, "hidden_size") // heads)
    bias = reader.read(bool, "attention_bias", False)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=reader.read(int, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=rope(reader, head_dim) if rotary is None else rotary,
        qk_norm=qk_norm,
        bias=bias,
        output_bias=bias,
        window=window,
    )


def mlp(reader: Reader) -> MlpConfig:
    """Gated feed-forward part as Llama and its kin write it."""
    return MlpConfig(
        intermediate=reader.read(int, "intermediate_size"),
        activation=activation(reader),
        bias=reader.read(bool, "mlp_bias", False),
    )


def full_attention_only(reader: Reader) -> None:
    """Refuse sliding windows, however the config spells them, where they are not part of the family."""
    reader.refuse("use_sliding_window", "this family is served with full attention only", False)
    reader.skip("max_window_layers")
    if "use_sliding_window" in reader:
        reader.skip("sliding_window")  # read by the model only when use_sliding_window is true
    else:
        reader.refuse("sliding_window", "this family is served with full attention only")
    kinds = set(reader.read(list, "layer_types", [])) - {"full_attention"}
    if kinds:
        raise ConfigError(
            f"{reader.where}: layer_types holds {', '.join(map(repr, sorted(kinds)))}, not implemented here"
        )


def decoder(reader: Reader, family: str, layers: tuple[LayerConfig, ...], rotary: RopeConfig | None) -> ModelConfig:
    """The whole of a plain decoder around its layers."""
    reader.refuse(
        "quantization_config", "weights are read as float32, bfloat16 or float16; use an unquantized checkpoint"
    )
    return ModelConfig(
        family=family,
        vocab_size=reader.read(int, "vocab_size"),
        hidden=reader.read(int, "hidden_size"),
        layers=layers,
        norm=NormConfig(eps=reader.read(float, "rms_norm_eps")),
        max_position=reader.read(int, "max_position_embeddings") if rotary is None else max_position(reader, rotary),
        tied=reader.read(bool, "tie_word_embeddings", False),
        dtype=dtype(reader),
        eos_ids=reader.ints("eos_token_id"),
    )


def num_experts(reader: Reader, *keys: str) -> int:
    """The count of routed experts, which releases of transformers keep under different keys."""
    said = {value for key in keys if (value := reader.optional(int, key)) is not None}
    if len(said) != 1:
        raise ConfigError(f"{reader.where} must give one of {', '.join(keys)}; it gives {len(said)} different values")
    return said.pop()


def layer_types(reader: Reader, kinds: tuple[str, str], every_key: str, every: int) -> list[str]:
    """The kind of each layer: listed, or the second kind in each `every_key`-th layer and the first elsewhere.

    Raises ConfigError for a kind that is none of `kinds` and for a list of another length.
    """
    every, count = reader.read(int, every_key, every), num_layers(reader)
    listed = reader.read(list, "layer_types", [kinds[(i + 1) % every == 0] for i in range(count)])
    unknown = sorted(set(map(str, listed)) - set(kinds))
    if unknown:
        raise ConfigError(
            f"{reader.where}: layer_types holds {', '.join(unknown)}, not implemented; implemented: {', '.join(kinds)}"
        )
    if len(listed) != count:
        raise ConfigError(f"{reader.where}: layer_types holds {len(listed)} kinds for {count} layers")
    return listed


def num_layers(reader: Reader) -> int:
    return reader.read(int, "num_hidden_layers")


def attention_rules(config: AttentionConfig, name: str = "model.layers.{layer}.self_attn") -> list[Rule]:
    """q, k and v become one matrix; `{layer}` is filled in later."""
    at = "layers.{layer}.mixer"
    projections = tuple(f"{name}.{part}_proj" for part in "qkv")
    rules = [
        Rule(f"{at}.qkv.weight", tuple(f"{p}.weight" for p in projections), concat),
        Rule(f"{at}.out.weight", (f"{name}.o_proj.weight",)),
    ]
    if config.bias:
        rules.append(Rule(f"{at}.qkv.bias", tuple(f"{p}.bias" for p in projections), concat))
    if config.output_bias:
        rules.append(Rule(f"{at}.out.bias", (f"{name}.o_proj.bias",)))
    if config.qk_norm:
        rules += [Rule(f"{at}.{part}_norm", (f"{name}.{part}_norm.weight",)) for part in "qk"]
    return rules


def mlp_rules(config: MlpConfig, name: str = "model.layers.{layer}.mlp") -> list[Rule]:
    """gate and up become one matrix."""
    at = "layers.{layer}.ffn"
    kinds = ("weight", "bias") if config.bias else ("weight",)
    rules = [
        Rule(f"{at}.gate_up.{kind}", (f"{name}.gate_proj.{kind}", f"{name}.up_proj.{kind}"), concat) for kind in kinds
    ]
    return rules + [Rule(f"{at}.down.{kind}", (f"{name}.down_proj.{kind}",)) for kind in kinds]


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
    """Each expert's gate and up become one matrix, and all experts one tensor, the shared ones last. `parts` are the
    names of gate, up and down."""
    gate, up, down = parts
    experts = [f"{name}.experts.{e}" for e in range(config.num_experts)]
    behind = [f"{name}.shared_experts"] if config.num_shared else []
    pairs = tuple(f"{expert}.{part}.weight" for expert in experts + behind for part in (gate, up))
    downs = tuple(f"{expert}.{down}.weight" for expert in experts + behind)
    at = "layers.{layer}.ffn"
    return [
        Rule(f"{at}.gate_up", pairs, shared_behind_concat if behind else stack_concat),
        Rule(f"{at}.down", downs, shared_behind if behind else stack),
    ]


def outer_rules(config: ModelConfig) -> list[Rule]:
    """Embedding, final norm and, when it is not the embedding again, the head."""
    rules = [
        Rule("embed.weight", (f"{config.prefix}.embed_tokens.weight",)),
        Rule("norm.weight", (f"{config.prefix}.norm.weight",)),
    ]
    return rules if config.tied else [*rules, Rule("head.weight", ("lm_head.weight",))]


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
