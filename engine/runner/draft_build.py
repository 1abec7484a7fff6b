"""From the settings to what drafts on the device: read its config, build it, plan its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from engine import files
from engine.cache.spec import CompressedKV, Recurrent
from engine.config import EngineConfig
from engine.layers.build_context import BuildContext
from engine.models import eagle3, registry
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.draft_heads import DraftHead, Eagle3Head, mtp_head
from engine.models.gguf.names import open_folder
from engine.models.loaded import Loaded
from engine.models.mtp import outer_rule
from engine.models.parts import with_shared_apart
from engine.models.reader import ConfigError
from engine.parallel.shard import Shard, shard_config
from engine.parallel.slices import shard_checkpoint
from engine.parallel.vocabulary import Vocabulary
from engine.quant import cache_scales
from engine.quant import device as quant_device
from engine.quant import plan as quant
from engine.quant.formats import rounded
from engine.quant.method import Method
from engine.weights import dummy, loader
from engine.weights.checkpoint import Checkpoint
from engine.weights.rules import Rule
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.select import Ops

MAX_BYTES = 256 << 20  # of a tokenizer.json


@dataclass(frozen=True)
class DraftWeights:
    """What drafts, without memory, and what gives it its weights."""

    module: Decoder | DraftHead
    fill: Callable[[], None]


@dataclass(frozen=True)
class Target:
    """The model that is drafted for, before its share of ranks was cut out."""

    model: ModelConfig
    family: registry.Family
    shard: Shard
    checkpoint: Checkpoint | None
    method: Method | None


@dataclass(frozen=True)
class Asked:
    """What the settings say of a module's weights; see `engine.quant.plan.plan`."""

    activations: str
    quantize: rounded.Kind | None
    unrounded: tuple[str, ...] = quant.OUTER


def prepare(config: EngineConfig, build: BuildContext, decoder: Decoder, target: Target) -> DraftWeights | None:
    """What drafts on the device for a decoder that was built so; None when nothing does. Raises ConfigError, each with
    a sentence for the user, and WeightsError."""
    method, folder = config.speculation.method, config.speculation.model
    if method == "draft" and folder is not None:
        return _model(folder, config, build)
    if method == "eagle3" and folder is not None:
        return _eagle3(folder, config, build)
    if method == "mtp":
        return _mtp(config, build, decoder, target)
    return None


def _model(folder: str, config: EngineConfig, build: BuildContext) -> DraftWeights:
    """A smaller model."""
    model, family = registry.load(folder)
    _check_vocabulary(folder, model.vocab_size, config, build)
    if model.max_position < build.max_model_len:
        raise ConfigError(
            f"speculation.model {folder} has {model.max_position} positions and requests may have "
            f"{build.max_model_len}: lower max_model_len, or take another draft model"
        )
    checkpoint = None
    if config.load_format != "dummy":
        checkpoint = registry.as_ruled(family, open_folder(folder))
    rules = family.rules(model)
    scales = cache_scales.found(checkpoint, model.prefix, len(model.layers), bool(build.cache_scales))
    decoder = Decoder(_own_build(build, model, checkpoint, rules, scales.of(len(model.layers))))
    if any(isinstance(spec, Recurrent | CompressedKV) for specs in decoder.specs for spec in specs):
        raise ConfigError(
            f"speculation.model {folder} has layers with a running state, from which drafts that do not stand cannot "
            "be taken back: take another draft model"
        )
    unused, said = (*registry.unused(family, model), *scales.names), registry.quantization(folder)
    copies = registry.copies(model)
    fill = _planned(decoder, model, checkpoint, rules, said, unused, copies, _apart(config), build.ops)
    _check_rounded(decoder, config)
    quant_device.check_weights(decoder.weights, build.device)
    decoder.materialize(build.device)
    return DraftWeights(decoder, fill)


def _eagle3(folder: str, config: EngineConfig, build: BuildContext) -> DraftWeights:
    """A head of EAGLE-3."""
    if build.config.hyper is not None:
        raise ConfigError(
            "speculation.method eagle3 reads one residual stream, and this model keeps several: set it to none"
        )
    parsed = eagle3.parse(registry.values(folder), build.config)
    model = parsed.model
    _check_vocabulary(folder, model.vocab_size, config, build)
    checkpoint = None if config.load_format == "dummy" else Checkpoint.open(folder).renamed(eagle3.rename)
    names = None if checkpoint is None else checkpoint.entries
    rules = eagle3.rules(parsed, names)
    own_embedding = eagle3.has_embedding(names)
    if not own_embedding and model.hidden != build.config.hidden:
        raise ConfigError(
            f"speculation.model {folder} has no embed_tokens of its own, and the model's are {build.config.hidden} "
            f"wide, not {model.hidden}: take the head that was trained for this model"
        )
    own = _own_build(build, model, checkpoint, rules, (UNSCALED,) * len(model.layers))
    head = Eagle3Head(parsed, own, own_embedding, eagle3.has_table(parsed, names))
    said = registry.quantization(folder)
    filled = _planned(head, model, checkpoint, rules, said, eagle3.UNUSED, {}, _apart(config), build.ops)
    _check_rounded(head, config)
    quant_device.check_weights(head.weights, build.device)
    head.materialize(build.device)

    def fill() -> None:
        filled()
        if checkpoint is None:
            head.spread()
        head.number()

    return DraftWeights(head, fill)


def _mtp(config: EngineConfig, build: BuildContext, decoder: Decoder, target: Target) -> DraftWeights:
    """The model's own module for further tokens."""
    whole = target.model
    said = registry.mtp_config(target.family, whole)
    if said is None:
        raise ConfigError(
            "speculation.method mtp needs layers that predict further tokens, and this model's config.json names none "
            "that are implemented: take ngram, suffix, draft or eagle3"
        )
    held = None if target.checkpoint is None else target.checkpoint.entries
    own = {name: entry for name, entry in (held or {}).items() if name.startswith(said.prefix)}
    if held is not None and not own:
        raise ConfigError(
            f"speculation.method mtp needs the layers that predict further tokens, and the checkpoint holds no tensor "
            f"{said.prefix}*: take the checkpoint as it was published, or another method"
        )
    quantize = config.weights.quantize
    checkpoint = None if held is None else Checkpoint(own)
    if quant.shared_apart(said.rules, checkpoint, target.method, quantize):
        whole = with_shared_apart(whole)
        said = registry.mtp_config(target.family, whole) or said
    # What equals the model's is the model's.
    apart = {
        part: theirs
        for part, (ours, theirs) in zip(("embed", "head"), said.outer.items(), strict=True)
        if held is not None and theirs in own and not (ours in held and loader.equal(held[ours], own[theirs]))
    }
    outer = [outer_rule(part, name) for part, name in apart.items()]
    model = replace(whole, layers=(said.layer,))
    if checkpoint is not None and target.shard.size > 1:
        vocabulary = Vocabulary(model.vocab_size, build.communicator)
        ordered = quant.ordered_inputs(said.rules, checkpoint, target.method)
        checkpoint = shard_checkpoint(checkpoint, [*said.rules, *outer], model, target.shard, vocabulary, {}, ordered)
    said = registry.mtp_config(target.family, shard_config(whole, target.shard)) or said
    rules = [*said.rules, *outer]
    count = len(target.model.layers) + 1
    scales = cache_scales.found(target.checkpoint, model.prefix, count, bool(build.cache_scales))
    own_build = replace(
        build,
        config=shard_config(model, target.shard),
        cache_scales=scales.of(count)[-1:] if build.cache_scales else (),
    )
    head = mtp_head(own_build)(said, own_build, decoder, "embed" in apart, "head" in apart)
    unused = (*scales.names, *said.outer.values())
    asked = Asked(config.weights.activations, quantize)
    fill = _planned(head, model, checkpoint, rules, target.method, unused, {}, asked, build.ops)
    quant_device.check_weights(head.weights, build.device)
    head.materialize(build.device)
    return DraftWeights(head, fill)


def _apart(config: EngineConfig) -> Asked:
    """Of a checkpoint of its own: the head speaks drafts alone, and an embedding is looked up and not multiplied by."""
    return Asked(config.weights.activations, config.speculation.quantize, ("embed.weight",))


def _check_rounded(module: Loaded, config: EngineConfig) -> None:
    quantize = config.speculation.quantize
    if quantize is not None and not any(isinstance(weight.held, rounded.Rounded) for weight in module.weights.values()):
        raise ConfigError(
            f"speculation.quantize = {quantize!r} is for 16-bit checkpoints, and speculation.model "
            f"{config.speculation.model} is quantized: leave it out"
        )


def _check_vocabulary(folder: str, count: int, config: EngineConfig, build: BuildContext) -> None:
    if count != build.config.vocab_size or not same_vocabulary(Path(folder), Path(config.model)):
        raise ConfigError(
            f"speculation.model {folder} has another vocabulary ({count} tokens) than the model that it drafts for "
            f"({build.config.vocab_size} tokens): take a draft model of the same tokenizer"
        )


def _own_build(
    build: BuildContext,
    model: ModelConfig,
    checkpoint: Checkpoint | None,
    rules: Sequence[Rule],
    scales: tuple[CacheScales, ...],
) -> BuildContext:
    """As the large model was built, on one rank. scales: of each layer's cache, where caches hold 8-bit floats."""
    narrow = checkpoint is None or loader.dtypes(checkpoint, rules, ".router") <= {build.dtype}
    return BuildContext(
        build.ops,
        model,
        build.dtype,
        build.device,
        build.max_model_len,
        build.deterministic,
        build.fused_attention,
        build.dtype if narrow else torch.float32,
        scales if build.cache_scales else (),
    )


def _planned(
    module: Loaded,
    model: ModelConfig,
    checkpoint: Checkpoint | None,
    rules: Sequence[Rule],
    method: Method | None,
    unused: Sequence[str],
    copies: Mapping[str, str],
    asked: Asked,
    ops: Ops,
) -> Callable[[], None]:
    """Gives the module's weights their formats, names what does not fit, and returns what fills it."""
    spare = quant.spare_biases(rules, checkpoint)
    rules = quant.plan(module.weights, rules, checkpoint, method, asked.activations, asked.quantize, asked.unrounded)
    rules = [rule.bound(ops) for rule in rules]
    if checkpoint is not None:
        loader.plan(dict(module.named_parameters()), checkpoint, rules, unused, (*copies, *spare))

    def fill() -> None:
        if checkpoint is None:
            dummy.fill(module.others, module.weights, module.bounds, model.hidden, model.norm.offset)
            return
        parameters = dict(module.named_parameters())
        loader.load(parameters, checkpoint, rules, unused, copies, None, module.bounds, spare)
        for name, weight in module.weights.items():
            weight.check(name)

    return fill


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
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
