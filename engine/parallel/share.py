"""What of a model one rank holds: the same layers, narrower. No torch.

A rank's decoder is that of a smaller model: every rule, format and kernel is what it is on one rank. Key-value heads
and inner channels are dealt out as evenly as they go; with fewer key-value heads than ranks each head is held by
several, which share its queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.models.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from engine.models.reader import ConfigError
from engine.weights.rules import Part

# Inner channels go by the largest of these that gives each rank some: blocks of FP8, groups and words of INT4.
UNITS = (128, 64, 32, 16, 8, 1)
Run = tuple[int, int]
# Of each part that a layer has, how many there are and the run [start, stop) of a rank.
Runs = dict[Part, tuple[int, Run]]


@dataclass(frozen=True, slots=True)
class Share:
    """One of `size` ranks. grain: inputs that share a scale, which no border may part."""

    rank: int
    size: int
    grain: int = 1

    def deal(self, count: int) -> Run:
        """The run of `count` things that the rank takes: the first ranks take one more where they do not go up."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)


def narrowed(model: ModelConfig, share: Share) -> ModelConfig:
    """The model as `share` holds it. Its vocabulary stays whole (`Vocabulary`).

    Raises ConfigError with the numbers for what cannot be shared out.
    """
    if share.size == 1:
        return model
    if model.hyper is not None:
        raise _refused(share, f"{model.family} keeps parallel residual streams")
    return replace(model, layers=tuple(_layer(layer, model, share) for layer in model.layers))


def _layer(layer: LayerConfig, model: ModelConfig, share: Share) -> LayerConfig:
    runs = runs_of(layer, model, share)
    size = {part: stop - start for part, (_, (start, stop)) in runs.items()}
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, AttentionConfig):
        mixer = replace(mixer, num_heads=size["heads"], num_kv_heads=size["groups"])
    elif isinstance(mixer, LatentAttentionConfig):
        mixer = replace(mixer, num_heads=size["heads"])
    return replace(layer, mixer=mixer, ffn=replace(ffn, intermediate=size["inner"]))


def runs_of(layer: LayerConfig, model: ModelConfig, share: Share) -> Runs:
    """What the rank takes of each part of a layer. Raises ConfigError as `narrowed` does."""
    mixer, ffn = layer.mixer, layer.ffn
    known = isinstance(mixer, AttentionConfig | LatentAttentionConfig) and isinstance(ffn, MlpConfig | MoeConfig)
    if not known or getattr(mixer, "gated", False) or getattr(mixer, "sinks", False):
        raise _refused(share, f"{model.family} has layers of {type(mixer).__name__}")
    if isinstance(ffn, MoeConfig) and getattr(ffn, "bias", False):
        raise _refused(share, f"{model.family} has experts with biases")
    made: Runs = {"inner": (ffn.intermediate, _inner(ffn.intermediate, share))}
    assert isinstance(mixer, AttentionConfig | LatentAttentionConfig)
    if isinstance(mixer, AttentionConfig):
        heads, groups = _heads(mixer.num_heads, mixer.num_kv_heads, share)
        made["groups"] = (mixer.num_kv_heads, groups)
    elif mixer.num_heads < share.size:
        raise _refused(share, f"it has {mixer.num_heads} heads, less than one for each")
    else:
        heads = share.deal(mixer.num_heads)
    made["heads"] = (mixer.num_heads, heads)
    return made


def _heads(heads: int, groups: int, share: Share) -> tuple[Run, Run]:
    """The rank's query heads and key-value heads, of which each serves heads / groups queries."""
    each = heads // groups
    if groups >= share.size:
        start, stop = share.deal(groups)
        return (start * each, stop * each), (start, stop)
    holders = share.size // groups
    if share.size % groups or each < holders:
        raise _refused(
            share,
            f"its {groups} key-value heads, each of {each} query heads, go neither into {share.size} nor "
            f"{share.size} into them",
        )
    group = share.rank // holders
    start, stop = Share(share.rank % holders, holders).deal(each)
    return (group * each + start, group * each + stop), (group, group + 1)


def _inner(count: int, share: Share) -> Run:
    """The rank's inner channels: as many as the others have, if that can be."""
    units = [unit for unit in UNITS if unit % share.grain == 0 and count % unit == 0 and count // unit >= share.size]
    even = [unit for unit in units if count // unit % share.size == 0]
    for unit in even or units:
        start, stop = share.deal(count // unit)
        return start * unit, stop * unit
    raise _refused(
        share, f"a feed-forward part of {count} channels is stored in runs of {share.grain}, too few of them"
    )


def _refused(share: Share, why: str) -> ConfigError:
    return ConfigError(
        f"parallel.tensor = {share.size} is not possible for this model: {why}; set it to 1 or to a number that fits"
    )
