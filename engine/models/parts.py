"""Parts of a decoder as config.json files describe them. A family file composes these; it says only what is its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, cast

from engine.models import rope
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

ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Layers of a model, and experts of a layer: each has rules of its own.
MAX_PARTS = 1 << 12
DTYPES = ("float32", "bfloat16", "float16")

DType = Literal["float32", "bfloat16", "float16"]


def attention(
    reader: Reader,
    *,
    rotary: RopeConfig | None = None,
    partial: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
) -> AttentionConfig:
    """Grouped-query attention as Llama and its kin write it. `rotary` None reads it from the config, `partial` as in
    `rope.from_config`."""
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
        rope=rope.from_config(reader, head_dim, partial=partial) if rotary is None else rotary,
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


def activation(reader: Reader, key: str = "hidden_act") -> Activation:
    return ACTIVATIONS[reader.require(key, *ACTIVATIONS)]


def dtype(reader: Reader) -> DType | None:
    """The dtype the checkpoint was saved in, if the config says so."""
    said = [name for key in ("dtype", "torch_dtype") if (name := reader.optional(str, key)) is not None]
    if not said:
        return None
    name = said[0].removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"{reader.where}: dtype = {said[0]!r} is not implemented; implemented: {', '.join(DTYPES)}")
    return cast(DType, name)


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
        max_position=rope.reachable_positions(reader, rotary),
        tied=reader.read(bool, "tie_word_embeddings", False),
        dtype=dtype(reader),
        eos_ids=reader.token_ids("eos_token_id", vocab_size),
    )


def with_shared_apart(config: ModelConfig) -> ModelConfig:
    """The same model, whose shared experts stand in no table with the others."""
    layers = [
        replace(layer, ffn=replace(layer.ffn, apart=True)) if isinstance(layer.ffn, MoeConfig) else layer
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))
