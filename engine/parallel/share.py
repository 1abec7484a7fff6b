"""What of a model one rank holds: the same layers, narrower, filled from slices of the same tensors.

A rank's decoder is that of a smaller model, and its checkpoint that of one: every rule, format and kernel is what it is
on one rank. Key-value heads and inner channels are dealt out as evenly as they go; with fewer key-value heads than
ranks each head is held by several, which share its queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

from engine.cache.spec import PoolSpec
from engine.config import EngineConfig
from engine.models.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    ModelConfig,
    MoeConfig,
)
from engine.models.reader import ConfigError
from engine.parallel.communicator import Communicator
from engine.parallel.vocabulary import Vocabulary
from engine.weights.checkpoint import Checkpoint, Entry, WeightsError
from engine.weights.rules import Part, Rule, Split

# Inner channels go by the largest of these that gives each rank some: blocks of FP8, groups and words of INT4.
UNITS = (128, 64, 32, 16, 8, 1)
# The end of a module's tensor that holds the shape of the whole, which is no rank's.
SHAPE = "weight_shape"
# Layouts whose matrices are stored [inputs, outputs].
TURNED = ("qweight", "scales", "qzeros")

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


def check_parallel(config: EngineConfig, communicator: Communicator) -> None:
    """Raises ConfigError for settings that several ranks do not honour."""
    asked, size = config.parallel.tensor, communicator.size
    if asked != size:
        raise ConfigError(f"parallel.tensor is {asked}, and {size} ranks are here: start as many as are asked for")
    method = config.speculation.method
    if size > 1 and method != "none":
        raise ConfigError(
            f"speculation.method {method} is not implemented with parallel.tensor = {size}: set one of them to "
            "none or to 1"
        )
    if size > 2 and config.runtime.deterministic:
        raise ConfigError(
            f"runtime.deterministic needs sums of ranks in one order, which parallel.tensor = {size} does not promise: "
            "use at most 2, or leave deterministic off"
        )


def agreed(pool: PoolSpec, communicator: Communicator) -> PoolSpec:
    """The pool that every rank can hold: of each group the fewest blocks that a rank has room for.

    Raises ConfigError when ranks group layers in different ways, as uneven heads may.
    """
    if communicator.size == 1:
        return pool
    layers = crc32(repr([group.layers for group in pool.groups]).encode())
    told = communicator.agree([layers, len(pool.num_blocks), pool.num_state_slots])
    if any(other != told[0] for other in told):
        raise ConfigError("ranks hold layers of different sizes, which one pool does not: use another parallel.tensor")
    counts = communicator.agree(list(pool.num_blocks))
    return replace(pool, num_blocks=tuple(map(min, *counts)))


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
    runs = _runs(layer, model, share)
    size = {part: stop - start for part, (_, (start, stop)) in runs.items()}
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, AttentionConfig):
        mixer = replace(mixer, num_heads=size["heads"], num_kv_heads=size["groups"])
    elif isinstance(mixer, LatentAttentionConfig):
        mixer = replace(mixer, num_heads=size["heads"])
    return replace(layer, mixer=mixer, ffn=replace(ffn, intermediate=size["inner"]))


def _runs(layer: LayerConfig, model: ModelConfig, share: Share) -> Runs:
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


def sliced(
    checkpoint: Checkpoint,
    rules: Iterable[Rule],
    model: ModelConfig,
    share: Share,
    vocabulary: Vocabulary,
    copies: Mapping[str, str],
) -> Checkpoint:
    """The rank's slices of a checkpoint of `model`, the whole one. copies: as `loader.load` has them.

    Raises WeightsError with the numbers where a border between ranks falls into a block or group of a format.
    """
    if share.size == 1:
        return checkpoint
    entries, cuts = dict(checkpoint.entries), {}
    layers = [_runs(layer, model, share) for layer in model.layers]
    words = (vocabulary.start, vocabulary.start + vocabulary.count)
    for rule in rules:
        runs = _of_target(rule.target, layers)
        runs["vocabulary"] = (vocabulary.total, words)
        for source, split in rule.shared.items():
            count, (start, stop) = runs[split.part]
            wide = split.width
            cuts[source] = _Cut(split, count * wide, start * wide, stop * wide)
    for name, other in copies.items():
        if other in cuts:
            cuts[name] = cuts[other]
    by_module = {source.removesuffix(".weight"): cut for source, cut in cuts.items()}
    for name, entry in checkpoint.entries.items():
        module, _, end = name.rpartition(".")
        cut = cuts.get(name) or (by_module.get(module) if end != "bias" else None)
        if cut is None:
            continue
        if end == SHAPE:
            del entries[name]
        else:
            entries[name] = cut.of(entry, end, share)
    return Checkpoint(entries)


def _of_target(target: str, layers: list[Runs]) -> Runs:
    parts = target.split(".")
    return dict(layers[int(parts[1])]) if parts[0] == "layers" else {}


@dataclass(frozen=True, slots=True)
class _Cut:
    """Outputs or inputs [start, stop) of the `whole` that a module has."""

    split: Split
    whole: int
    start: int
    stop: int

    def of(self, entry: Entry, end: str, share: Share) -> Entry:
        """The slice of one of the module's tensors, each entry of which stands for one or several numbers."""
        along = int(self.split.axis == "inputs")
        if end == "g_idx" or end == "weight_g_idx":
            if along:
                raise WeightsError(
                    f"{entry.name} says which group each input is of, and {share.size} ranks share the inputs, which "
                    "is not implemented: use a checkpoint without g_idx, or parallel.tensor 1"
                )
            return entry
        if end in TURNED:
            along = 1 - along
        if along >= len(entry.shape) or entry.shape[along] == 1:
            return entry  # one for all, or a bias-like row of what is not shared
        size = entry.shape[along]
        each = -(-self.whole // size)
        if self.start % each or (self.stop % each and self.stop != self.whole):
            raise WeightsError(
                f"{entry.name} has one number for {each} of {self.whole} {self.split.axis}, and {share.size} ranks "
                f"would share them at {self.start} and {self.stop}: use a parallel.tensor that divides "
                f"{self.whole // each}"
            )
        start, stop = self.start // each, -(-self.stop // each)
        return entry.rows(start, stop) if along == 0 else entry.columns(start, stop)


def _refused(share: Share, why: str) -> ConfigError:
    return ConfigError(
        f"parallel.tensor = {share.size} is not possible for this model: {why}; set it to 1 or to a number that fits"
    )
