"""A rank's slices of a checkpoint, which are that of a narrower model; and what ranks agree on at the start."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

import torch

from engine.cache.spec import PoolSpec
from engine.config import EngineConfig
from engine.models.config import LatentAttentionConfig, ModelConfig
from engine.models.reader import ConfigError
from engine.parallel.communicator import Communicator
from engine.parallel.shard import Run, Runs, Shard, runs_of
from engine.parallel.vocabulary import Vocabulary
from engine.weights.checkpoint import Checkpoint, Entry, WeightsError
from engine.weights.rules import Rule, Sections, Split
from kernels.sizes import cdiv, next_power_of_2
from kernels.weight.gguf import FORMATS

# The end of a module's tensor that holds the shape of the whole, which is no rank's.
SHAPE = "weight_shape"
# Two tensors with a matrix a head may stand in the place of one, in GGUF files, and are cut by heads as it would be.
DIVIDED, BY_HEADS = "kv_b_proj", ("k_b_proj", "v_b_proj")
# What says which group each input is of: its numbers count from the first input of all.
WHOLE = ("g_idx", "weight_g_idx")
# Layouts whose matrices are stored [inputs, outputs].
TURNED = ("qweight", "scales", "qzeros")
# What has a value for each group of inputs, or block of both sides. Zero points may stand in words of several outputs.
GRIDS = ("scales", "qzeros", "weight_scale", "weight_scale_inv", "scale", "weight_zero_point")
ZEROS = ("qzeros", "weight_zero_point")


def check_parallel(config: EngineConfig, model: ModelConfig, communicator: Communicator) -> None:
    """Raises ConfigError for settings that several ranks do not honour."""
    asked, size = config.parallel.tensor, communicator.size
    if asked != size:
        raise ConfigError(f"parallel.tensor is {asked}, and {size} ranks are here: start as many as are asked for")
    if config.parallel.block_shares > 1:
        _check_context(config, model)


def _check_context(config: EngineConfig, model: ModelConfig) -> None:
    other = next((layer.mixer for layer in model.layers if not isinstance(layer.mixer, LatentAttentionConfig)), None)
    if other is not None:
        raise ConfigError(
            "parallel.context sliced is for models whose layers all have latent attention, and this one has layers of "
            f"{type(other).__name__}: leave it at whole"
        )
    if config.speculation.method in ("draft", "eagle3"):
        raise ConfigError(
            f"parallel.context sliced shares out latents, and what drafts with speculation.method "
            f"{config.speculation.method} keeps entries of every token beside them, which is not implemented: let "
            "ngram, suffix or mtp draft, or leave it at whole"
        )
    if config.runtime.deterministic:
        raise ConfigError(
            "runtime.deterministic has no attention over tokens of several ranks in one order, which parallel.context "
            "sliced needs: leave one of them out"
        )


def agreed(pool: PoolSpec, communicator: Communicator) -> PoolSpec:
    """The pool that every rank can hold: of each group the fewest blocks that a rank has room for.

    Raises ConfigError when ranks group layers in different ways, as uneven heads may.
    """
    if communicator.size == 1:
        return pool
    layers = crc32(repr([group.layers for group in pool.groups]).encode())
    told = communicator.all_gather_numbers([layers, len(pool.num_blocks), pool.num_state_slots])
    if any(other != told[0] for other in told):
        raise ConfigError("ranks hold layers of different sizes, which one pool does not: use another parallel.tensor")
    counts = communicator.all_gather_numbers(list(pool.num_blocks))
    return replace(pool, num_blocks=tuple(map(min, *counts)))


def shard_checkpoint(
    checkpoint: Checkpoint,
    rules: Iterable[Rule],
    model: ModelConfig,
    shard: Shard,
    vocabulary: Vocabulary,
    copies: Mapping[str, str],
    ordered: Collection[str] = (),
) -> Checkpoint:
    """The rank's slices of a checkpoint of `model`, the whole one. copies: as `loader.load` has them. ordered: modules
    that give their inputs an order; some of their inputs may be of any group, and come with the values of all.

    Raises WeightsError with the numbers where a boundary between ranks falls into a block or group of a format.
    """
    if shard.size == 1:
        return checkpoint
    entries, cuts, elsewhere = dict(checkpoint.entries), {}, set()
    layers = [runs_of(layer, model, shard) for layer in model.layers]
    words = (vocabulary.start, vocabulary.start + vocabulary.count)
    for rule in rules:
        runs = _of_target(rule.target, layers)
        runs["vocabulary"] = (vocabulary.total, words)
        for source, split in rule.shared.items():
            if split.expert is None or split.expert in range(*runs["experts"][1]):
                cuts[source] = _cut(split, runs)
            else:
                elsewhere.add(source.removesuffix(".weight"))
    for name, other in copies.items():
        if other in cuts:
            cuts[name] = cuts[other]
    by_module = {source.removesuffix(".weight"): cut for source, cut in cuts.items()}
    for module in [module for module in by_module if module.endswith(f".{DIVIDED}")]:
        by_module |= {module.removesuffix(DIVIDED) + part: by_module[module] for part in BY_HEADS}
    for name, entry in checkpoint.entries.items():
        module, _, end = name.rpartition(".")
        if module in elsewhere:
            del entries[name]
            continue
        cut = cuts.get(name) or (by_module.get(module) if end != "bias" else None)
        if cut is None:
            continue
        if end == SHAPE:
            del entries[name]
        elif not cut.is_whole:
            apart = cut.axis == "inputs" and module in ordered
            entries[name] = cut.of_ordered(entry, end, shard) if apart else cut.of(entry, end, shard)
    return Checkpoint(entries)


def _of_target(target: str, layers: list[Runs]) -> Runs:
    parts = target.split(".")
    return dict(layers[int(parts[1])]) if parts[0] == "layers" else {}


def _cut(split: Split | Sections, runs: Runs) -> Cut:
    at, kept = 0, []
    for section in split.sections:
        count, (start, stop) = runs[section.part]
        kept.append((at + start * section.width, at + stop * section.width))
        at += count * section.width
    return Cut(split.axis, at, tuple(kept))


@dataclass(frozen=True, slots=True)
class Cut:
    """Runs [start, stop) of the `whole` outputs or inputs that a module has."""

    axis: str
    whole: int
    runs: tuple[Run, ...]

    @property
    def is_whole(self) -> bool:
        return self.runs == ((0, self.whole),)

    def of_ordered(self, entry: Entry, end: str, shard: Shard) -> Entry:
        """As `of`, where inputs have an order."""
        if end in GRIDS:
            return entry
        if end in WHOLE:
            ((start, stop),) = self.runs
            return replace(entry.rows(start, stop), of_share=True)
        return self.of(entry, end, shard)

    def of(self, entry: Entry, end: str, shard: Shard) -> Entry:
        """The slice of one of the module's tensors, each entry of which stands for one or several numbers."""
        along = int(self.axis == "inputs")
        if end in WHOLE:
            return entry
        if end in TURNED:
            along = 1 - along
        words = entry.dtype == torch.int32 and not (self.axis == "inputs" and end in ZEROS)
        if along >= len(entry.shape) or (entry.shape[along] == 1 and not words):
            return entry  # one for all, or a bias-like row of what is not shared
        # A row of a GGUF file is blocks of bytes.
        size = FORMATS[entry.blocks].num_bytes if entry.blocks is not None and along else 1
        each = cdiv(self.whole * size, entry.shape[along])
        if words or end in GRIDS:
            each = next_power_of_2(each)  # the last word or block may be short
        if any(start % each or (stop % each and stop != self.whole) for start, stop in self.runs):
            borders = ", ".join(f"{start} to {stop}" for start, stop in self.runs)
            held, fits = "number" if size == 1 else f"block of {entry.blocks}", self.whole // each
            remedy = f"use a parallel.tensor that divides {fits}" if fits > 1 else "set parallel.tensor to 1"
            raise WeightsError(
                f"{entry.name} has one {held} for {each} of {self.whole} {self.axis}, and of these one of {shard.size} "
                f"ranks would take {borders}: {remedy}"
            )
        runs = [(start // each * size, -(-stop // each) * size) for start, stop in self.runs]
        return entry.column_runs(runs) if along else entry.runs(runs)
