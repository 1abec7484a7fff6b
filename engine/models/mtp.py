"""Modules that a model was trained with to predict further tokens (multi-token prediction; DeepSeek-V3 2024,
arXiv:2412.19437, §2.2): as EAGLE-3's heads they draft from hidden states, of the last layer.

    x_i = project(norm(embedding of token i + 1), norm(h_i)), then one layer, which says token i + 2
    h_i is the model's last hidden state, normed; further tokens come of the layer's own in its place

With hyper-connections (DeepSeek-V4) h_i is all residual streams, each of which is normed and projected by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.models.config import LayerConfig
from engine.models.weight_rules import BY_TOKEN
from engine.weights.rules import Rule


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The first of such modules, which alone drafts.

    prefix: of its tensors' names. normed: the module's own hidden state is normed before the next token comes of it.
    rules: where its parameters come from. outer: its embedding and its head, which the paper shares with the model's,
    by the names of the model's; a checkpoint may hold them again, or others.
    """

    layer: LayerConfig
    prefix: str
    normed: bool
    rules: tuple[Rule, ...]
    outer: Mapping[str, str]


def outer_rule(part: str, source: str) -> Rule:
    """Of an embedding ("embed") or head of the module's own."""
    return Rule(f"{part}.weight", (source,), splits=BY_TOKEN)


def rules(layer: Sequence[Rule], **parts: str) -> tuple[Rule, ...]:
    """Those of the module's layer, and of its other parts: the weight of each by the checkpoint's name for it."""
    others = (Rule(f"{ours}.weight", (f"{theirs}.weight",)) for ours, theirs in parts.items())
    return (*(rule.at(0) for rule in layer), *others)
