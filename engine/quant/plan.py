"""Which format each weight of a decoder takes, by the tensors that the checkpoint holds, and what fills it then."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from engine.quant.format import Kind
from engine.quant.formats import fp4, fp8, gguf, int8, mixed, packed, rounded
from engine.quant.formats.dense import Dense
from engine.quant.formats.layouts import NAMES
from engine.quant.formats.parts import Part, Parts, rule_of
from engine.quant.method import Method
from engine.quant.scheme import Fp4Scheme, Fp8Scheme, GgufScheme, Int8Scheme, PackedScheme, Scheme
from engine.quant.weight import Weight
from engine.weights.checkpoint import Checkpoint, Entry, WeightsError, listed
from engine.weights.rules import Concat, Rule, Shape, SharedBehind, SharedBehindConcat, StackConcat
from kernels.weight.gguf import FORMATS

log = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# What speaks tokens keeps its numbers.
OUTER = ("embed.weight", "head.weight")
MAX_STEPS = 50_000_000  # to look all modules up in what the config says of them: some seconds
# Outputs and inputs of a block that share a scale of 8-bit floats, where a weight's reader takes no others.
SQUARE = (128, 128)
# scheme → the module of its format
KINDS: dict[type, Kind] = {
    Fp4Scheme: fp4,
    Fp8Scheme: fp8,
    GgufScheme: gguf,
    Int8Scheme: int8,
    PackedScheme: packed,
}


def plan(
    weights: Mapping[str, Weight],
    rules: Sequence[Rule],
    checkpoint: Checkpoint | None,
    method: Method | None,
    activations: str = "auto",
    quantize: rounded.Kind | None = None,
    unrounded: Collection[str] = OUTER,
) -> list[Rule]:
    """Give each of `weights`, by name, the format that its sources have, and return the rules that fill parameters.

    The checkpoint's tensors decide: `method` says how a module is stored if it is, and a module that is stored as it is
    stays so whether or not the config says that it was left out. Without a checkpoint the config decides. activations
    "16bit" leaves the inputs of products as they are. quantize rounds what is stored as it is, less `unrounded`, while
    it is loaded.

    Raises WeightsError for a table whose sources are stored in different ways.
    """
    check_steps(rules, method)
    entries = None if checkpoint is None else checkpoint.entries
    made: list[Rule] = []
    for rule in rules:
        weight = weights.get(rule.target)
        if weight is None:
            made.append(rule)
            continue
        filled = _filled(weight, rule, entries, method, activations)
        plain = isinstance(weight.held, Dense) and weight.kinds == "any"
        if quantize is not None and plain and rule.target not in unrounded:
            weight.hold(rounded.make(quantize, len(rule.sources), weight.shape, activations == "16bit"))
            filled = weight.held.rules(rule, weight.shape)
        made += filled
    return made


def shared_apart(
    rules: Sequence[Rule],
    checkpoint: Checkpoint | None,
    method: Method | None,
    quantize: rounded.Kind | None = None,
) -> bool:
    """Whether shared experts are stored in another way than the others of their layer, or in one that no table can hold
    beside them: they are a product of their own then. Raises WeightsError as `check_steps` does."""
    check_steps(rules, method)
    entries = None if checkpoint is None else checkpoint.entries
    for rule in rules:
        if not isinstance(rule.combine, SharedBehind | SharedBehindConcat):
            continue
        # Of a pair gate and up may be stored in different ways, which leaves no place for others behind them.
        first, last, second = (_scheme(rule.sources[i].removesuffix(".weight"), entries, method) for i in (0, -1, 1))
        splits = (quantize is None or rounded.SPLITS[quantize]) if first is None else KINDS[type(first)].SPLITS
        # A group of inputs may be those of two shared experts.
        grouped = isinstance(first, Fp8Scheme) and first.exponents
        if first != last or first != second or grouped or not splits:
            return True
    return False


def shard_alignment(
    rules: Sequence[Rule],
    method: Method | None,
    quantize: rounded.Kind | None = None,
    whole_experts: bool = False,
    entries: Mapping[str, Entry] | None = None,
) -> int:
    """Inputs or outputs of a layer's projections that share a scale, a word or a block, which no slice may part.
    whole_experts: experts are not sliced. entries: of the checkpoint. Raises WeightsError as `check_steps` does."""
    check_steps(rules, method)
    if quantize is not None:
        return rounded.GROUP if quantize == "int4" else 1
    modules: set[str] = set()
    for rule in rules:
        sliced = [name for name, split in rule.shared.items() if split.expert is None or not whole_experts]
        if rule.target not in OUTER:
            # Of a table of experts one that is chosen and, last, one that is shared.
            table = any(split.expert is not None for split in rule.shared.values())
            few = (*sliced[:1], *sliced[-1:]) if table else sliced
            modules |= {name.removesuffix(".weight") for name in few}
    schemes = {scheme for module in modules if method is not None and (scheme := method.scheme(module)) is not None}
    blocks = [max(scheme.block) for scheme in schemes if isinstance(scheme, Fp8Scheme) and scheme.block]
    blocks += [fp4.NAMES[scheme.layout].group for scheme in schemes if isinstance(scheme, Fp4Scheme)]
    stored = [entries[name] for module in modules if (name := f"{module}.weight") in entries] if entries else []
    blocks += [FORMATS[entry.blocks].num_values for entry in stored if entry.blocks is not None]
    # A word holds 32 bits, of outputs or of inputs. Of inputs in an order a rank may take some of each group.
    packed_schemes = [scheme for scheme in schemes if isinstance(scheme, PackedScheme)]
    blocks += [min(scheme.group, 32) if scheme.ordered else scheme.group or 32 for scheme in packed_schemes]
    return max(blocks, default=1)


def ordered_inputs(rules: Sequence[Rule], checkpoint: Checkpoint, method: Method | None) -> frozenset[str]:
    """Modules whose inputs ranks share and that give them an order, by the config and a tensor of theirs. Raises
    WeightsError as `check_steps` does."""
    if method is None:
        return frozenset()
    check_steps(rules, method)
    shared = {name for rule in rules for name, split in rule.shared.items() if split.axis == "inputs"}
    ends = dict.fromkeys(names.order for names in NAMES.values() if names.order is not None)
    found = set()
    for module in (name.removesuffix(".weight") for name in shared):
        held = [(end, entry) for end in ends if (entry := checkpoint.entries.get(f"{module}.{end}")) is not None]
        schemes = [method.scheme(entry.name.removesuffix(f".{end}")) for end, entry in held]
        if any(isinstance(scheme, PackedScheme) and scheme.ordered for scheme in schemes):
            found.add(module)
    return frozenset(found)


def check_steps(rules: Sequence[Rule], method: Method | None) -> None:
    """Raises WeightsError where the config's patterns, and the modules that each is tried on, are too many together."""
    modules = sum(len(rule.sources) for rule in rules)
    if method is not None and method.steps * modules > MAX_STEPS:
        raise WeightsError(
            f"the patterns of quantization_config may take {method.steps} steps for each of {modules} modules, and at "
            f"most {MAX_STEPS} are taken for all: write fewer patterns, or names in their place"
        )


def spare_biases(rules: Sequence[Rule], checkpoint: Checkpoint | None) -> list[str]:
    """Biases of packed projections that the model does not have: AutoGPTQ wrote zeros for them."""
    if checkpoint is None:
        return []
    used = {source for rule in rules for source in rule.sources}
    modules = [name.removesuffix(".qweight") for name in checkpoint.entries if name.endswith(".qweight")]
    return [bias for module in modules if (bias := f"{module}.bias") in checkpoint.entries and bias not in used]


def _filled(
    weight: Weight, rule: Rule, entries: Mapping[str, Entry] | None, method: Method | None, activations: str
) -> list[Rule]:
    rule = rule if entries is None else gguf.joined(rule, entries)
    modules = [source.removesuffix(".weight") for source in rule.sources]
    schemes = [_scheme(module, entries, method) for module in modules]
    if GgufScheme() in schemes:
        # A file chooses a format for each tensor, and numbers as they are may be one of them.
        schemes = [GgufScheme() if other is None else other for other in schemes]
    scheme = schemes[0]
    about = [_alike(own, module, entries) for own, module in zip(schemes, modules, strict=True)]
    runs = _runs(rule, weight.shape, about) if weight.kinds == "any" else ()
    if len(runs) > 1:
        held = _parts(rule, weight.shape, schemes, runs, entries, activations)
        weight.hold(held)
        return held.rules(rule, weight.shape)
    some = mixed.scheme_of(schemes, activations == "16bit")
    if some is not None:
        if entries is None:
            return weight.held.rules(rule, weight.shape)
        named = [(source, module) for source, module, own in zip(rule.sources, modules, schemes, strict=True) if own]
        quantized = replace(rule, sources=tuple(source for source, _ in named))
        made = KINDS[type(some)].dequantized(some, [module for _, module in named], quantized, entries)
        log.info("%s: some of its parts are quantized, and it is held dense: %s", rule.target, listed(modules))
        return [mixed.filled(rule, made, schemes)]
    if any(other != scheme for other in schemes[1:]):
        odd = [module for module, other in zip(modules, schemes, strict=True) if other != scheme]
        raise WeightsError(
            f"{listed(odd)} and {modules[0]} are stored in different ways, and they stand in one table of matrices or "
            "are read as dense numbers together here, which is not implemented: use a checkpoint that quantizes all of "
            "them or none alike"
        )
    if scheme is None:
        return weight.held.rules(rule, weight.shape)
    kind = KINDS[type(scheme)]
    if weight.kinds == "any":
        weight.hold(kind.make(scheme, modules, rule, weight.shape, entries, activations == "16bit"))
        return weight.held.rules(rule, weight.shape)
    if weight.kinds == "dense or fp8" and isinstance(scheme, Fp8Scheme):
        blocks = fp8.make(scheme, modules, rule, weight.shape, entries, exact_inputs=True)
        if blocks.block == SQUARE:
            weight.hold(blocks)
            return weight.held.rules(rule, weight.shape)
    if entries is None:
        return weight.held.rules(rule, weight.shape)
    return [kind.dequantized(scheme, modules, rule, entries)]


def _alike(scheme: Scheme | None, module: str, entries: Mapping[str, Entry] | None) -> Hashable:
    """What projections of one format have in common."""
    if scheme is None or entries is None:
        return scheme
    return scheme, KINDS[type(scheme)].alike(scheme, module, entries)


def _runs(rule: Rule, shape: Shape, about: Sequence[Hashable]) -> Sequence[tuple[tuple[int, ...], int]]:
    """Sources that are stored alike and may be a part of the weight, and how many rows they fill: none where all are
    alike, or cannot be parts. Of a table gates and ups may, where those of all matrices are alike."""
    if all(other == about[0] for other in about):
        return ()
    if isinstance(rule.combine, Concat):
        rows = rule.combine.rows
        grouped = (tuple(run) for _, run in groupby(range(len(about)), lambda place: about[place]))
        return [(run, sum(rows[place] for place in run)) for run in grouped]
    halves = [tuple(range(first, len(about), 2)) for first in (0, 1)]
    pairs = isinstance(rule.combine, StackConcat) and len(about) == 2 * shape[0]
    alike = all(len({about[place] for place in half}) == 1 for half in halves)
    return [(half, shape[-2] // 2) for half in halves] if pairs and alike else ()


def _parts(
    rule: Rule,
    shape: Shape,
    schemes: Sequence[Scheme | None],
    runs: Sequence[tuple[tuple[int, ...], int]],
    entries: Mapping[str, Entry] | None,
    activations: str,
) -> Parts:
    """A format for each run of projections that are stored alike."""
    parts = []
    for places, rows in runs:
        part, scheme, own = Part(Dense(), places, rows), schemes[places[0]], rule_of(rule, places)
        if scheme is not None:
            modules = [source.removesuffix(".weight") for source in own.sources]
            kind, exact = KINDS[type(scheme)], activations == "16bit"
            part = replace(part, held=kind.make(scheme, modules, own, part.of(shape), entries, exact))
        parts.append(part)
    return Parts(tuple(parts))


def _scheme(module: str, entries: Mapping[str, Entry] | None, method: Method | None) -> Scheme | None:
    """How the module's weight is stored; None: as it is, or missing, which the loader says."""
    if entries is None:
        return None if method is None else method.scheme(module)
    ends = dict.fromkeys(("weight", *(end for kind in KINDS.values() for end in kind.DATA)))
    end = next((end for end in ends if f"{module}.{end}" in entries), None)
    if end is None:
        return None
    weight = entries[f"{module}.{end}"]
    if end == "weight" and weight.dtype in FLOATS:
        return None
    if weight.blocks is not None:
        return GgufScheme()
    # The config speaks of the name that the checkpoint has, which a family may have changed.
    said = None if method is None else method.scheme(weight.name.removesuffix(f".{end}"))
    if said is None:
        stored = str(weight.dtype).removeprefix("torch.")
        raise WeightsError(f"{weight.name} is stored as {stored}, and config.json does not say that it is quantized")
    lacking = KINDS[type(said)].lacking(said, module, entries)
    if lacking is not None:
        raise WeightsError(lacking)
    return said
