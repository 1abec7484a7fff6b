"""Where a decoder's weights come from, under the usual names: rules that family files compose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from engine.models.config import AttentionConfig, MlpConfig, ModelConfig, MoeConfig
from engine.weights.rules import Rule, SharedBehind, SharedBehindConcat, Split, Stack, StackConcat, concat

# How ranks share gate and up, down, and what speaks tokens.
INNER_OUT, INNER_IN = Split("outputs", "inner"), Split("inputs", "inner")
BY_TOKEN = (Split("outputs", "vocabulary"),)


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
    experts = [f"{name}.experts.{e}" for e in config.experts]
    behind = [f"{name}.shared_experts"] if config.num_behind else []
    pairs = tuple(f"{expert}.{part}.weight" for expert in experts + behind for part in (gate, up))
    downs = tuple(f"{expert}.{down}.weight" for expert in experts + behind)
    at = "layers.{layer}.ffn"
    own = [
        tuple(replace(INNER_OUT, expert=e) for e in config.experts for _ in range(2)),
        tuple(replace(INNER_IN, expert=e) for e in config.experts),
    ]
    last: list[tuple[Split, ...]] = [2 * (Split("outputs", "shared"),), (Split("inputs", "shared"),)]
    ups_split, downs_split = (a + b if behind else a for a, b in zip(own, last, strict=True))
    rules = [
        Rule(f"{at}.gate_up", pairs, SharedBehindConcat() if behind else StackConcat(), splits=ups_split),
        Rule(f"{at}.down", downs, SharedBehind() if behind else Stack(), splits=downs_split),
    ]
    if config.num_shared and config.apart:
        inner = config.shared_inner or config.num_shared * config.intermediate
        both = (f"{name}.shared_experts.{gate}.weight", f"{name}.shared_experts.{up}.weight")
        rules += [
            Rule(f"{at}.shared.gate_up.weight", both, concat(inner, inner), splits=last[0]),
            Rule(f"{at}.shared.down.weight", (f"{name}.shared_experts.{down}.weight",), splits=last[1]),
        ]
    return rules


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
