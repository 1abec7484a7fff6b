"""Fills a model's parameters from a checkpoint by rules, and checks both sides: every parameter filled exactly once,
every tensor used or known to be unused.

`runs` says which bytes, and `staging` brings them there.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from engine.weights.checkpoint import Checkpoint, Entry, Files, WeightsError, listed
from engine.weights.rules import Rule
from engine.weights.runs import BUFFER_BYTES, Made, Piece
from engine.weights.staging import Progress, copy

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
INTS = frozenset({torch.int64, torch.int32})
# Powers of two, which any float holds.
EXPONENTS = frozenset({torch.float8_e8m0fnu, torch.float32})

# Tensors that some checkpoints hold although they can be computed from the config.
DERIVED = ("*.rotary_emb.inv_freq", "rotary_emb.inv_freq", "*.masked_bias", "*.attn.bias")


def load(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    unused: Iterable[str] = (),
    copies: Mapping[str, str] = MappingProxyType({}),
    progress: Progress | None = None,
    bounds: Mapping[str, int] = MappingProxyType({}),
    zeros: Iterable[str] = (),
) -> None:
    """Fill `parameters` in place. `unused` are name patterns of tensors that this model does not need, and `copies`
    names of tensors that may be there if they equal another, whose name stands behind. `bounds` names parameters that
    hold ids, which are below the number behind, and `zeros` tensors that may be there if they hold nothing else.

    Raises WeightsError that names every missing, extra, misshapen and wrong-dtype tensor; parameters are then
    untouched, since everything is checked before the first byte is read.
    """
    with torch.no_grad():
        zeros = tuple(zeros)
        pieces = plan(parameters, checkpoint, rules, unused, (*copies, *zeros))
        for name, other in copies.items():
            if name in checkpoint.entries and not equal(checkpoint.entries[name], checkpoint.entries[other]):
                raise WeightsError(
                    f"config.json says that {name} is {other} (tie_word_embeddings), and the checkpoint holds another "
                    "tensor there: set tie_word_embeddings to false, or remove the tensor"
                )
        for name in zeros:
            if not _all_zero(checkpoint.entries[name]):
                raise WeightsError(f"{name} is not zero, and this model has no such bias: its architecture is another")
        copy(pieces, progress)
        for name, below in bounds.items():
            if not bool(((parameters[name] >= 0) & (parameters[name] < below)).all()):
                raise WeightsError(f"the tensor of {name} holds ids outside of 0 to {below - 1}")


def dtypes(checkpoint: Checkpoint, rules: Sequence[Rule], ending: str) -> set[torch.dtype]:
    """Those of the tensors that fill parameters whose names end so."""
    names = {name for rule in rules if rule.target.endswith(ending) for name in rule.sources}
    return {checkpoint.entries[name].dtype for name in names & checkpoint.entries.keys()}


def plan(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    rules: Sequence[Rule],
    unused: Iterable[str] = (),
    copies: Iterable[str] = (),
) -> list[Piece | Made]:
    """Match rules with both sides, which needs no memory behind `parameters`. Raises WeightsError with all that is
    wrong."""
    entries = checkpoint.entries
    pieces: list[Piece | Made] = []
    wrong: list[str] = []
    lacking: list[str] = []
    patterns = (*DERIVED, *unused, *copies)
    targets: set[str] = set()
    sources: set[str] = set()
    for rule in rules:
        for target in rule.targets:
            if target in targets:
                raise WeightsError(f"two rules fill the parameter {target}")
            if target not in parameters:
                raise WeightsError(f"a rule fills {target}, which the model does not have")
            targets.add(target)
        named = [*rule.sources, *(name for beside in rule.beside for name in beside)]
        sources.update(named)
        missing = [name for name in named if name not in entries]
        if missing:
            lacking += missing
            continue
        made, problems = _made(rule, [parameters[target] for target in rule.targets], entries)
        pieces += made
        wrong += problems
    unfilled = sorted(set(parameters) - targets)
    if unfilled:
        raise WeightsError(f"no rule fills the parameters {listed(unfilled)}")
    if lacking:
        wrong.append(f"missing: {listed(list(dict.fromkeys(lacking)))}")
    extra = sorted(
        name for name in set(entries) - sources if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    )
    if extra:
        wrong.append(f"not part of this model: {listed(extra)}")
    if wrong:
        raise WeightsError("the checkpoint's tensors do not fit its config.json; " + listed(wrong, separator="; "))
    return pieces


def _made(
    rule: Rule, targets: Sequence[torch.Tensor], entries: Mapping[str, Entry]
) -> tuple[Sequence[Piece | Made], list[str]]:
    sources = [entries[name].as_bytes() if rule.as_bytes else entries[name] for name in rule.sources]
    views = [rule.combine(target, [entry.shape for entry in sources]) for target in targets]
    if rule.transform is None:
        return _pieces(sources, views[0])
    made, wrong = [], []
    for entry, *own, beside in zip(sources, *views, rule.beside or ((),) * len(sources), strict=True):
        parts = tuple((view,) if isinstance(view, torch.Tensor) else tuple(view) for view in own)
        one = Made((entry, *(entries[name] for name in beside)), parts, rule.transform)
        made.append(one)
        if not rule.transform.fits([e.shape for e in one.entries], one.shape):
            wrong.append(f"misshapen: {', '.join(map(_shaped, one.entries))}, needed for {list(one.shape)}")
    return made, wrong


def _pieces(
    entries: Sequence[Entry], views: Sequence[torch.Tensor | list[torch.Tensor]]
) -> tuple[list[Piece], list[str]]:
    pieces, wrong = [], []
    for entry, view in _parts(entries, views):
        if tuple(view.shape) != entry.shape:
            wrong.append(f"misshapen: {_shaped(entry)}, needed {list(view.shape)}")
        elif entry.dtype != view.dtype and not any(
            {entry.dtype, view.dtype} <= kinds for kinds in (FLOATS, INTS, EXPONENTS)
        ):
            found, needed = (str(dtype).removeprefix("torch.") for dtype in (entry.dtype, view.dtype))
            wrong.append(
                f"wrong dtype: {entry.name} is {found}, needed {needed}, and config.json does not "
                "say how it is quantized"
            )
        else:
            pieces.append(Piece(entry, view))
    return pieces, wrong


def _parts(
    entries: Sequence[Entry], views: Sequence[torch.Tensor | list[torch.Tensor]]
) -> Iterable[tuple[Entry, torch.Tensor]]:
    """Each source with its view; one that is given several is cut into as many runs of rows, and one whose view has a
    dimension more has its rows cut."""
    for entry, view in zip(entries, views, strict=True):
        if isinstance(view, torch.Tensor):
            if view.dim() == 3 and len(entry.shape) == 2:
                rows = (len(view), view.shape[1] * view.shape[2])
                if entry.shape == rows:
                    entry = replace(entry, shape=tuple(view.shape))
                else:
                    view = torch.empty(rows, dtype=view.dtype, device="meta")  # for the message
            yield entry, view
        elif (needed := (sum(len(part) for part in view), *view[0].shape[1:])) != entry.shape:
            yield entry, torch.empty(needed, dtype=view[0].dtype, device="meta")
        else:
            start = 0
            for part in view:
                yield entry.rows(start, start + len(part)), part
                start += len(part)


def _shaped(entry: Entry) -> str:
    return f"{entry.name} {list(entry.shape)}"


def equal(one: Entry, other: Entry) -> bool:
    """Whether two tensors hold the same bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    buffers = bytearray(BUFFER_BYTES), bytearray(BUFFER_BYTES)
    with Files() as files:
        for at in range(0, one.num_bytes, BUFFER_BYTES):
            size = min(BUFFER_BYTES, one.num_bytes - at)
            for entry, buffer in zip((one, other), buffers, strict=True):
                files.open(entry.file)
                files.read_into(entry.file, entry.start + at, memoryview(buffer)[:size])
            if buffers[0][:size] != buffers[1][:size]:
                return False
    return True


def _all_zero(entry: Entry) -> bool:
    with Files() as files:
        return not bool(files.tensor(entry).any())
