"""A small model that drafts: it computes every token that the large one computes, and before a step with drafts a few
more. Its keys and values lie in the same pool, in blocks that are given, shared and taken back with the large one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from engine import files
from engine.cache.spec import CompressedKV, Recurrent
from engine.cache.tensors import LayerCache
from engine.layers.build_context import BuildContext
from engine.models import registry
from engine.models.decoder import Decoder
from engine.models.gguf.names import open_folder
from engine.models.reader import ConfigError
from engine.quant import cache_scales
from engine.quant import plan as quant
from engine.runner.batch import DeviceBatch, LastTokens
from engine.runner.inputs import Inputs, StepShape
from engine.runner.tables import RowTables
from engine.sampling.sampler import PLAIN, Sampler
from engine.weights import dummy, loader
from kernels import Ops

MAX_BYTES = 256 << 20  # of a tokenizer.json


@dataclass(frozen=True)
class DraftWeights:
    """A decoder without memory, and what gives it its weights."""

    decoder: Decoder
    fill: Callable[[], None]


class DraftModel:
    """Draws drafts as the large model draws tokens, by the same noise: where the two agree on what is likely, they draw
    the same. caches are those of its layers."""

    def __init__(
        self, decoder: Decoder, caches: tuple[tuple[LayerCache, ...], ...], ops: Ops, inputs: Inputs, tables: RowTables
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._ops = ops
        self._sampler = Sampler(ops)
        self._inputs = inputs
        self._tables = tables

    def follow(self, batch: DeviceBatch, last_tokens: LastTokens | None, briefly: bool) -> None:
        """Compute the tokens of a step of the large model. briefly: one layer of each kind, for a warm-up."""
        self._decoder(batch, self._caches, self._decoder.kinds if briefly else None, last_tokens)

    def propose(self, shape: StepShape, briefly: bool) -> None:
        """Put drafts for the staged step into the token table, whose entries begin at their true ends. An entry that
        wants no more of them computes a dummy token."""
        tables, first, end = self._tables, shape.num_single, shape.num_single + shape.drafting
        count, entries = self._inputs.proposals(shape).count[first:end], self._inputs.entries(shape)
        last, own = entries.lengths[first:end] - count - 1, entries.rows[first:end]
        only = self._decoder.kinds if briefly else None
        for drafted in range(shape.drafts):
            wanted = count > drafted
            rows = torch.where(wanted, own, tables.dummy)
            at = torch.where(wanted, last + drafted, 0)
            x = self._decoder(self._inputs.single_tokens(rows, at, shape.max_context), self._caches, only)
            held = at + 1
            logits = self._decoder.logits(x)
            drawn = self._sampler.draw(logits, tables.params, rows, held, tables.tokens, PLAIN)
            self._ops.keep_tokens(drawn.tokens, tables.tokens, rows, held)


def prepare(folder: str, target: str, build: BuildContext, load_format: str) -> DraftWeights:
    """The draft model in `folder`, for a target that was built so. Raises ConfigError, each with a sentence for the
    user, and WeightsError."""
    model, family = registry.load(folder)
    if model.vocab_size != build.config.vocab_size or not same_vocabulary(Path(folder), Path(target)):
        raise ConfigError(
            f"speculation.model {folder} has another vocabulary ({model.vocab_size} tokens) than the model that it "
            f"drafts for ({build.config.vocab_size} tokens): take a draft model of the same tokenizer"
        )
    if model.max_position < build.max_model_len:
        raise ConfigError(
            f"speculation.model {folder} has {model.max_position} positions and requests may have "
            f"{build.max_model_len}: lower max_model_len, or take another draft model"
        )
    checkpoint = None if load_format == "dummy" else open_folder(folder).renamed(registry.rename(family))
    method, rules = registry.quantization(folder), family.rules(model)
    narrow = checkpoint is None or loader.dtypes(checkpoint, rules, ".router") <= {build.dtype}
    routers = build.dtype if narrow else torch.float32
    scales = cache_scales.found(checkpoint, model.prefix, bool(build.cache_scales))
    own = BuildContext(
        build.ops,
        model,
        build.dtype,
        build.device,
        build.max_model_len,
        build.deterministic,
        build.fused_attention,
        routers,
        scales.of(len(model.layers)) if build.cache_scales else (),
    )
    decoder = Decoder(own)
    if any(isinstance(spec, Recurrent | CompressedKV) for specs in decoder.specs for spec in specs):
        raise ConfigError(
            f"speculation.model {folder} has layers with a running state, from which drafts that do not stand cannot "
            "be taken back: take another draft model"
        )
    spare = quant.spare_biases(rules, checkpoint)
    copies, unused = registry.copies(model), (*registry.unused(family, model), *scales.names)
    rules = quant.plan(decoder.weights, rules, checkpoint, method, "auto", None)
    if checkpoint is not None:
        loader.plan(dict(decoder.named_parameters()), checkpoint, rules, unused, (*copies, *spare))
    decoder.materialize(build.device)

    def fill() -> None:
        if checkpoint is None:
            dummy.fill(decoder.others, decoder.weights, decoder.bounds, model.hidden, model.norm.offset)
            return
        parameters = dict(decoder.named_parameters())
        loader.load(parameters, checkpoint, rules, unused, copies, None, decoder.bounds, spare)
        for name, weight in decoder.weights.items():
            weight.check(name)

    return DraftWeights(decoder, fill)


def same_vocabulary(one: Path, other: Path) -> bool:
    """Whether the tokenizers of two checkpoints have the same tokens; where one has no tokenizer.json that is not
    known, and taken to be so."""
    held = [_tokens(folder / "tokenizer.json") for folder in (one, other)]
    return None in held or held[0] == held[1]


def _tokens(file: Path) -> object:
    if not file.exists():
        return None
    try:
        said = msgspec.json.decode(files.read(file, MAX_BYTES))
        return said["model"]["vocab"]
    except (KeyError, TypeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
