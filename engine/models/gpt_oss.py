"""gpt-oss (arXiv:2508.10925): windows in every second layer, a sink for each head, biases, and experts with a clipped
gate, which are published in 4 bits.

Checkpoints keep all experts of a layer in one tensor, whose gates and ups alternate. `unstack` shows each expert's
matrices by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from engine.models import parts, weight_rules
from engine.models.config import AttentionConfig, LayerConfig, ModelConfig, MoeConfig
from engine.models.reader import LARGEST_POSITION, Reader
from engine.weights.rules import Rule, Shape, Split

if TYPE_CHECKING:
    from torch import Tensor

    from engine.weights.checkpoint import Checkpoint, Entry

# Biases of experts, a row each.
BY_EXPERT = (Split("outputs", "experts"),)
KINDS = ("sliding_attention", "full_attention")
# How a tensor of all experts ends, and what each expert's part of it is called.
ENDS = {"": "weight", "_blocks": "weight_packed", "_scales": "weight_scale"}


def parse(reader: Reader) -> ModelConfig:
    reader.assume(attention_bias=True, moe_intermediate_size=reader.size("intermediate_size"))
    full = replace(parts.attention(reader), sinks=True)
    windowed = replace(full, window=reader.size("sliding_window", most=LARGEST_POSITION))
    mixers = dict(zip(KINDS, (windowed, full), strict=True))
    # By this factor the gate's sigmoid is steeper: a constant of the kernels.
    reader.require("swiglu_alpha", 1.702, default=1.702)
    experts = parts.experts(reader, limit=reader.positive("swiglu_limit", 7.0), bias=True, router_bias=True)
    reader.require("experts_per_token", experts.top_k, default=experts.top_k)
    reader.skip("initial_context_length", "router_aux_loss_coef", "output_router_logits")
    experts = replace(experts, activation="swiglu_oai")
    layers = tuple(LayerConfig(mixers[kind], experts) for kind in parts.layer_types(reader, KINDS, every=2))
    return parts.decoder(reader, "gpt_oss", layers, full.rope)


def rules(config: ModelConfig) -> list[Rule]:
    made = weight_rules.outer_rules(config)
    for index, layer in enumerate(config.layers):
        assert isinstance(layer.mixer, AttentionConfig)
        assert isinstance(layer.ffn, MoeConfig)
        name = "model.layers.{layer}"
        templates = [
            *weight_rules.norm_rules(),
            *weight_rules.attention_rules(layer.mixer),
            Rule("layers.{layer}.mixer.sinks", (f"{name}.self_attn.sinks",), splits=(Split("outputs", "heads"),)),
            *_expert_rules(layer.ffn, f"{name}.mlp"),
        ]
        made += [rule.at(index) for rule in templates]
    return made


def _expert_rules(config: MoeConfig, name: str) -> list[Rule]:
    at = "layers.{layer}.ffn"
    return [
        Rule(f"{at}.router", (f"{name}.router.weight",)),
        Rule(f"{at}.router_bias", (f"{name}.router.bias",)),
        *(replace(rule, transform=Transposed()) for rule in weight_rules.expert_rules(config, name)),
        Rule(f"{at}.gate_up_bias", (f"{name}.experts.gate_up_proj_bias",), transform=Apart(), splits=BY_EXPERT),
        Rule(f"{at}.down_bias", (f"{name}.experts.down_proj_bias",), splits=BY_EXPERT),
    ]


@dataclass(frozen=True, slots=True)
class Transposed:
    """A matrix [K, N] of a tensor that is stored inputs first, or of one whose columns alternate with those of another
    [K, 2N − 1]: its numbers [N, K]."""

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        (n, k), found = view, shapes[0]
        return found in ((k, n), (k, 2 * n - 1))

    def __call__(self, tensors: Sequence[Tensor], view: Shape) -> Tensor:
        return tensors[0][:, :: 1 if tensors[0].shape[1] == view[0] else 2].T


@dataclass(frozen=True, slots=True)
class Apart:
    """Values that alternate along the last dimension: all of the first kind, then all of the second."""

    def fits(self, shapes: Sequence[Shape], view: Shape) -> bool:
        return shapes[0] == view and view[-1] % 2 == 0

    def __call__(self, tensors: Sequence[Tensor], view: Shape) -> Tensor:
        return tensors[0].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def unstack(checkpoint: Checkpoint) -> Checkpoint:
    """The same bytes, with a tensor for each expert's gate, up and down."""
    made: dict[str, Entry] = {}
    for name, entry in checkpoint.entries.items():
        experts, found, part = name.rpartition(".experts.")
        made.update(_apart(f"{experts}{found}", part, entry) if found else {name: entry})
    return type(checkpoint)(made)


def _apart(experts: str, part: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    """(name, tensor) of what a tensor of all experts holds; itself where it is none of those that are known."""
    for end, ours in ENDS.items():
        gates = part == f"gate_up_proj{end}"
        if (gates or part == f"down_proj{end}") and len(entry.shape) == (4 if end == "_blocks" else 3):
            for e in range(entry.shape[0]):
                one = entry.rows(e, e + 1)
                rows, width = one.shape[1], prod(one.shape[2:])
                if not gates:
                    yield f"{experts}{e}.down_proj.{ours}", replace(one, shape=(rows, width))
                    continue
                if end:
                    # Rows of gate and up alternate: a pair of them is a row of both.
                    both = replace(one, shape=(rows // 2, 2 * width))
                    pair = both.columns(0, width), both.columns(width, 2 * width)
                else:
                    both = replace(one, shape=(rows, width))
                    pair = both.columns(0, width - 1), both.columns(1, width)
                for name, half in zip(("gate_proj", "up_proj"), pair, strict=True):
                    yield f"{experts}{e}.{name}.{ours}", half
            return
    yield f"{experts}{part}", entry
