"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): one or a few layers that draft from what a large model's layers hold.

    g_i = fc(low_i, middle_i, high_i), of the large model's residual stream at three depths
    a_i = layers(g_i, embedding of token i + 1), which says token i + 2; further ones come of a_i in the place of g_i

Its checkpoints come in two layouts: of the method's authors and SpecForge, and of speculators.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from engine.models import parts, weight_rules
from engine.models.config import LayerConfig, ModelConfig, NormConfig
from engine.models.reader import LARGEST_POSITION, ConfigError, Reader
from engine.quant.config import KEYS
from engine.weights.rules import Rule

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
# The layers that a head may have: those of these model types.
LAYERS = ("llama", "qwen3")
# Tensors without use: which tokens have a draft (`d2t` says it as well), and what training compared with.
UNUSED = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """model: the head's layers and norm, with the vocabulary of the model that it drafts for. num_drafts: tokens that
    it can draft. taps: layers of that model in front of which the residual stream is read; their number stands for its
    end. tapped: width of that stream. normed: the head's own residual stream begins with the normed input. fc_norm:
    what is read is normed first."""

    model: ModelConfig
    num_drafts: int
    taps: tuple[int, ...]
    tapped: int
    normed: bool = False
    fc_norm: bool = False


def parse(values: dict[str, Any], target: ModelConfig) -> Eagle3Config:
    """The config.json of a head for `target`. Raises ConfigError for anything that is not implemented."""
    reader = Reader(values)
    named = values.get("architectures")
    if not isinstance(named, list) or not set(map(str, named)) & set(ARCHITECTURES):
        said = ", ".join(map(str, named)) if isinstance(named, list) else named
        raise ConfigError(
            f"config.json of speculation.model names the architecture {said}, which is no EAGLE-3 head; known: "
            f"{', '.join(ARCHITECTURES)}"
        )
    inner = _speculators(reader) if "speculators_model_type" in reader else None
    layer = inner or reader
    explicit = _taps(reader, target)
    model = _layers(layer, target)
    if inner is not None:
        reader.skip("tie_word_embeddings")
        inner.finish()
    config = Eagle3Config(
        model=model,
        num_drafts=reader.size("draft_vocab_size", target.vocab_size, most=target.vocab_size),
        taps=explicit or _middle(target),
        tapped=reader.size("target_hidden_size", target.hidden),
        normed=reader.read(bool, "norm_before_residual", False),
        fc_norm=reader.read(bool, "norm_before_fc", False),
    )
    reader.skip(*KEYS)
    reader.finish()
    reader.check(
        config.tapped == target.hidden,
        f"target_hidden_size = {config.tapped}, and the model that it drafts for has a width of {target.hidden}: take "
        "the head that was trained for this model",
    )
    return config


def _speculators(reader: Reader) -> Reader:
    """What the layout of speculators says around the layers' own config, which is returned."""
    reader.require("speculators_model_type", "eagle3")
    reader.skip("speculators_version", "embed_requires_grad", "enable_sp_ulysses", "inference_type")
    reader.refuse("parallel_drafting", "heads that draft several tokens at once are not implemented", False)
    outer = reader.child("speculators_config")
    if outer is not None:
        outer.require("algorithm", "eagle3", default="eagle3")
        outer.skip("default_proposal_method", "proposal_methods", "verifier")
        outer.finish()
    layer = reader.child("transformer_layer_config", "dtype", "torch_dtype")
    if layer is None:
        raise ConfigError(f"{reader.where} lacks transformer_layer_config, which heads of this layout need")
    return layer


def _taps(reader: Reader, target: ModelConfig) -> tuple[int, ...]:
    """The layers that a config names: beside the others in front of which the stream is read, in `eagle_config` those
    behind which it is, as the programs that train each kind have it."""
    ids = reader.items(int, "eagle_aux_hidden_state_layer_ids")
    inner = reader.child("eagle_config")
    if inner is not None:
        inner.require("use_aux_hidden_state", True, default=True)
        behind = inner.items(int, "eagle_aux_hidden_state_layer_ids")
        ids = [i + 1 for i in behind] if behind is not None and ids is None else ids
        inner.finish()
    last = len(target.layers)
    fits = all(0 <= i <= last for i in ids or ())
    reader.check(fits, f"eagle_aux_hidden_state_layer_ids names layers that a model of {last} layers does not have")
    return tuple(ids or ())


def _middle(target: ModelConfig) -> tuple[int, ...]:
    """The layers that heads read where their config names none, as published."""
    count = len(target.layers)
    if count < 4:
        raise ConfigError(
            f"config.json of speculation.model names no layers to read, and a model of {count} has too few for those "
            "that are taken then: give eagle_aux_hidden_state_layer_ids"
        )
    return (2, count // 2, count - 3)


def _layers(reader: Reader, target: ModelConfig) -> ModelConfig:
    parts.full_attention_only(reader)
    kind = reader.require("model_type", *LAYERS, default="llama")
    mixer = parts.attention(reader, qk_norm=kind == "qwen3")
    layer = LayerConfig(mixer, parts.mlp(reader))
    reader.skip("tie_word_embeddings", *KEYS)
    vocab_size = reader.size("vocab_size", most=LARGEST_POSITION)
    if vocab_size != target.vocab_size:
        raise ConfigError(
            f"speculation.model has another vocabulary ({vocab_size} tokens) than the model that it drafts for "
            f"({target.vocab_size} tokens): take a head that was trained for this model"
        )
    return ModelConfig(
        family="eagle3",
        vocab_size=vocab_size,
        hidden=reader.size("hidden_size"),
        layers=(layer,) * parts.num_layers(reader),
        norm=NormConfig(reader.positive("rms_norm_eps")),
        # Heads are trained on short texts and used on longer ones.
        max_position=target.max_position,
        tied=False,
        dtype=parts.dtype(reader),
        prefix="",
    )


def rename(name: str) -> str:
    """One name for a tensor in both layouts."""
    name = name.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def rules(config: Eagle3Config, names: Collection[str] | None) -> list[Rule]:
    """Where each parameter comes from. names: the tensors that there are, by their one name; None: all there may be.
    A table of draft tokens may be missing where all tokens have a draft, and the embedding where it is the model's."""
    at, layer = "layers.{layer}", config.model.layers[0]
    templates = [
        *weight_rules.norm_rules(name=at),
        *weight_rules.attention_rules(layer.mixer, f"{at}.self_attn"),  # type: ignore[arg-type]
        *weight_rules.mlp_rules(layer.ffn, f"{at}.mlp"),  # type: ignore[arg-type]
    ]
    made = [rule.at(i) for i in range(len(config.model.layers)) for rule in templates]
    made = [replace(rule, target=rule.target.replace("layers.0.mixer_norm", "layers.0.embed_norm")) for rule in made]
    plain = {"layers.0.hidden_norm": "layers.0.hidden_norm", "fc": "fc", "norm": "norm", "head": "lm_head"}
    if config.fc_norm:
        plain["fc_norm"] = "input_norm"
    if has_embedding(names):
        plain["embed"] = "embed_tokens"
    made += [Rule(f"{ours}.weight", (f"{theirs}.weight",)) for ours, theirs in plain.items()]
    return [*made, Rule("d2t", ("d2t",))] if has_table(config, names) else made


def has_embedding(names: Collection[str] | None) -> bool:
    """Whether a head has an embedding of its own."""
    return names is not None and "embed_tokens.weight" in names


def has_table(config: Eagle3Config, names: Collection[str] | None) -> bool:
    """Whether a head says which tokens its drafts are."""
    return config.num_drafts < config.model.vocab_size or (names is not None and "d2t" in names)
