"""What of a model one rank holds: the same layers, narrower. No torch.

A rank's decoder is that of a smaller model: every rule, format and kernel is what it is on one rank. Heads go with the
group that they share something with (a key-value head, a key head of a state, a product behind attention). Groups and
inner channels are dealt out as evenly as they go; with fewer key-value heads than ranks each head is held by several,
which share its queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from engine.models.config import (
    AttentionConfig,
    FeedForwardConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    LayerConfig,
    ModelConfig,
    MoeConfig,
    SparseAttentionConfig,
)
from engine.models.reader import ConfigError
from engine.weights.rules import Part


@dataclass(frozen=True, slots=True)
class Counted:
    """A mixer's fields that count its heads and the groups that these come in, and what groups are called. shared:
    several ranks may hold one group, each with some of its heads."""

    heads: str
    groups: str | None = None
    name: str = ""
    shared: bool = True


COUNTED: dict[type, Counted] = {
    AttentionConfig: Counted("num_heads", "num_kv_heads", "key-value heads"),
    GatedDeltaConfig: Counted("num_value_heads", "num_key_heads", "key heads"),
    LatentAttentionConfig: Counted("num_heads"),
    SparseAttentionConfig: Counted("num_heads", "out_groups", "groups of outputs", shared=False),
}
# Inner channels go by the largest of these, or of what is stored together, that gives each rank some: blocks of FP8,
# groups and words of INT4.
UNITS = (128, 64, 32, 16, 8, 1)
Run = tuple[int, int]
# Of each part that a layer has, how many there are and the run [start, stop) of a rank.
Runs = dict[Part, tuple[int, Run]]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one of `size` ranks holds. alignment: inputs that share a scale, which no boundary may part. whole_experts:
    routed experts are dealt out, and not their channels."""

    rank: int
    size: int
    alignment: int = 1
    whole_experts: bool = False

    def partition(self, count: int) -> Run:
        """The run of `count` things that the rank takes: the first ranks take one more where they do not go up."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return start, start + each + (self.rank < more)


def shard_config(model: ModelConfig, shard: Shard) -> ModelConfig:
    """The model as `shard` holds it. Its vocabulary stays whole (`Vocabulary`).

    Raises ConfigError with the numbers for what cannot be shared out.
    """
    if shard.size == 1:
        return model
    return replace(model, layers=tuple(_layer(layer, model, shard) for layer in model.layers))


def _layer(layer: LayerConfig, model: ModelConfig, shard: Shard) -> LayerConfig:
    runs = runs_of(layer, model, shard)
    size = {part: stop - start for part, (_, (start, stop)) in runs.items()}
    counted = COUNTED[type(layer.mixer)]
    fields: dict[str, Any] = {counted.heads: size["heads"]}
    if counted.groups is not None:
        fields[counted.groups] = size["groups"]
    ffn: FeedForwardConfig = replace(layer.ffn, intermediate=size["inner"])
    if isinstance(ffn, MoeConfig) and shard.whole_experts:
        # Every rank has a share of the shared experts' work, however tokens are routed.
        ffn = replace(ffn, held=runs["experts"][1], apart=True, shared_inner=size["shared"] or None)
    return replace(layer, mixer=replace(layer.mixer, **fields), ffn=ffn)


def runs_of(layer: LayerConfig, model: ModelConfig, shard: Shard) -> Runs:
    """What the rank takes of each part of a layer. Raises ConfigError as `shard_config` does."""
    mixer, ffn = layer.mixer, layer.ffn
    counted = COUNTED.get(type(mixer))
    if counted is None:
        raise _refused(shard, f"{model.family} has layers of {type(mixer).__name__}")
    if isinstance(ffn, MoeConfig) and ffn.bias and not shard.whole_experts:
        raise _refused(
            shard, f"{model.family} has experts with biases, which parallel.expert auto or whole deals out whole"
        )
    made = _channels(ffn, shard)
    count = getattr(mixer, counted.heads)
    if counted.groups is not None:
        groups = getattr(mixer, counted.groups)
        heads, own = _heads(count, groups, counted, shard)
        made["groups"] = (groups, own)
    elif count < shard.size:
        raise _refused(shard, f"it has {count} heads, less than one for each")
    else:
        heads = shard.partition(count)
    made["heads"] = (count, heads)
    return made


def _channels(ffn: FeedForwardConfig, shard: Shard) -> Runs:
    inner = ffn.intermediate
    if not isinstance(ffn, MoeConfig):
        return {"inner": (inner, _inner(inner, shard))}
    count, shared = ffn.num_experts, ffn.num_shared * inner
    if not shard.whole_experts:
        start, stop = _inner(inner, shard, ": parallel.expert auto or whole leaves experts as they are")
        # Shared experts are one matrix, of which a rank takes a run as wide as its shares of all of them.
        both = (start * ffn.num_shared, stop * ffn.num_shared)
        return {"inner": (inner, (start, stop)), "shared": (shared, both), "experts": (count, (0, count))}
    if count < shard.size:
        raise _refused(shard, f"it has {count} experts, less than one for each (parallel.expert is whole)")
    beside = _inner(shared, shard) if shared else (0, 0)
    return {"inner": (inner, (0, inner)), "shared": (shared, beside), "experts": (count, shard.partition(count))}


def _heads(heads: int, groups: int, counted: Counted, shard: Shard) -> tuple[Run, Run]:
    """The rank's heads and the groups that they are of, each of heads / groups."""
    each = heads // groups
    if groups >= shard.size:
        start, stop = shard.partition(groups)
        return (start * each, stop * each), (start, stop)
    # Each group is held by a run of ranks.
    holders = [Shard(group, groups).partition(shard.size) for group in range(groups)]
    if not counted.shared or any(stop - start > each for start, stop in holders):
        raise _refused(shard, f"its {groups} {counted.name}, each of {each} heads, are too few for {shard.size}")
    group, (first, last) = next((group, run) for group, run in enumerate(holders) if run[0] <= shard.rank < run[1])
    start, stop = Shard(shard.rank - first, last - first).partition(each)
    return (group * each + start, group * each + stop), (group, group + 1)


def _inner(count: int, shard: Shard, remedy: str = "") -> Run:
    """The rank's inner channels: as many as the others have, if that can be."""
    units = [
        unit
        for unit in sorted({*UNITS, shard.alignment}, reverse=True)
        if unit % shard.alignment == 0 and count % unit == 0 and count // unit >= shard.size
    ]
    even = [unit for unit in units if count // unit % shard.size == 0]
    for unit in even or units:
        start, stop = shard.partition(count // unit)
        return start * unit, stop * unit
    raise _refused(
        shard,
        f"a feed-forward part of {count} channels is stored in runs of {shard.alignment}, too few of them{remedy}",
    )


def _refused(shard: Shard, why: str) -> ConfigError:
    return ConfigError(
        f"parallel.tensor = {shard.size} is not possible for this model: {why}; set it to 1 or to a number that fits"
    )
