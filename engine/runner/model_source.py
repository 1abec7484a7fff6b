"""What a runner is built from, read before anything is built: a model's config, and where its weights come from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.models import registry
from engine.models.config import AttentionConfig, LatentAttentionConfig, ModelConfig, MoeConfig
from engine.models.gguf.names import open_folder
from engine.models.parts import with_shared_apart
from engine.models.reader import ConfigError
from engine.parallel.communicator import Communicator
from engine.parallel.shard import Shard, shard_config
from engine.parallel.slices import shard_checkpoint
from engine.parallel.vocabulary import Vocabulary
from engine.quant import cache as cached
from engine.quant import cache_scales
from engine.quant import device as quant_device
from engine.quant import plan as quant
from engine.quant.method import Method
from engine.runner.draft_build import Target
from engine.weights import loader
from engine.weights.checkpoint import Checkpoint
from engine.weights.rules import Rule
from kernels.cache_scales import CacheScales

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """One rank's part of a model, and where its weights come from.

    checkpoint: None fills weights with random numbers. rules: of the parameters, before formats are planned. unused:
    name patterns of tensors that nothing reads. copies: tensors that may be stored beside their equal.
    router_dtype: of the routers of experts. scales: of each layer's cache; none where caches hold no 8-bit floats.
    target: the whole model, for a drafter.
    """

    config: ModelConfig
    checkpoint: Checkpoint | None
    method: Method | None
    rules: list[Rule]
    unused: tuple[str, ...]
    copies: Mapping[str, str]
    dtype: torch.dtype
    router_dtype: torch.dtype
    scales: tuple[CacheScales, ...]
    target: Target


def read(
    config: EngineConfig,
    model: ModelConfig,
    family: registry.Family,
    communicator: Communicator,
    device: torch.device,
) -> ModelSource:
    """Open the checkpoint of `model` and cut this rank's part out of both.

    Raises ConfigError, WeightsError or ValueError, each with a sentence for the user.
    """
    method, quantize = registry.quantization(config.model), config.weights.quantize
    checkpoint = None
    if config.load_format != "dummy":
        checkpoint = registry.as_ruled(family, open_folder(config.model))
    _check_quantized(config, method is not None, checkpoint)
    dtype = _dtype(config, model, checkpoint)
    rules, unused, copies = family.rules(model), registry.unused(family, model), registry.copies(model)
    if quant.shared_apart(rules, checkpoint, method, quantize):
        model = with_shared_apart(model)
        rules = family.rules(model)
    entries = None if checkpoint is None else checkpoint.entries

    def shard_of(whole_experts: bool) -> Shard:
        alignment = quant.shard_alignment(rules, method, quantize, whole_experts, entries)
        return Shard(communicator.rank, communicator.size, alignment, whole_experts)

    shard = _chosen(config.parallel.expert, model, shard_of)
    target = Target(model, family, shard, checkpoint, method)
    if shard.size > 1:
        if checkpoint is not None:
            vocabulary = Vocabulary(model.vocab_size, communicator)
            ordered = quant.ordered_inputs(rules, checkpoint, method)
            checkpoint = shard_checkpoint(checkpoint, rules, model, shard, vocabulary, copies, ordered)
        model = shard_config(model, shard)
        rules = family.rules(model)
    # Routers keep all their bits, which is float32 unless the checkpoint has them in the model's dtype, as published
    # ones do.
    narrow = checkpoint is None or loader.dtypes(checkpoint, rules, ".router") <= {dtype}
    fp8 = _holds_fp8(config, model, device)
    scales = cache_scales.found(checkpoint, model.prefix, len(model.layers), fp8)
    return ModelSource(
        config=model,
        checkpoint=checkpoint,
        method=method,
        rules=rules,
        unused=(*unused, *scales.names),
        copies=copies,
        dtype=dtype,
        router_dtype=dtype if narrow else torch.float32,
        scales=scales.of(len(model.layers)) if fp8 else (),
        target=target,
    )


def _chosen(expert: str, model: ModelConfig, shard_of: Callable[[bool], Shard]) -> Shard:
    """The rank's share by `parallel.expert`; "auto" slices experts where that can be."""
    shard = shard_of(expert == "whole")
    if expert == "auto" and any(isinstance(layer.ffn, MoeConfig) for layer in model.layers):
        try:
            shard_config(model, shard)
        except ConfigError as error:
            log.info("experts are dealt out whole: %s", error)
            return shard_of(True)
    return shard


def _check_quantized(config: EngineConfig, said: bool, checkpoint: Checkpoint | None) -> None:
    """Raises ConfigError for settings that do not go with a quantized checkpoint. said: by its config.json."""
    blocks = checkpoint is not None and any(entry.blocks for entry in checkpoint.entries.values())
    quantize = config.weights.quantize
    if quantize is not None and (said or blocks):
        raise ConfigError(
            f"weights.quantize = {quantize!r} is for 16-bit checkpoints, and this one is quantized: leave it out, or "
            "serve the checkpoint that it was made of"
        )


def _holds_fp8(config: EngineConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether caches hold 8-bit floats. Raises ConfigError where they cannot."""
    asked = config.cache.storage_dtype
    fp8 = asked != "16bit" and cached.holds_fp8(asked, registry.cache_is_fp8(config.model))
    if not fp8:
        return False
    quant_device.check_cache(device)
    if not any(isinstance(layer.mixer, AttentionConfig | LatentAttentionConfig) for layer in model.layers):
        raise ConfigError(
            "cache.dtype fp8 is for layers of grouped-query and latent attention, and this model has none: set it to "
            "16bit"
        )
    return True


def _dtype(config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint | None) -> torch.dtype:
    named = model.dtype if config.runtime.dtype == "auto" else config.runtime.dtype
    if named is None:
        return torch.bfloat16 if checkpoint is None else checkpoint.dtype
    dtype: torch.dtype = getattr(torch, named)
    return dtype
