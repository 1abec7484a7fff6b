"""Settings of an engine, as frozen values. User settings only: what is computed at start has types of its own."""

from __future__ import annotations

import logging
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

log = logging.getLogger(__name__)

Positive = Annotated[int, Meta(ge=1)]
# Settings of the runtime by their former names.
RENAMED = {"late_launch": "delay_launch", "chosen_products": "tuned_gemms"}
# Tokens drafted for a request in a step.
MAX_DRAFTS = 16
# The same where their number is chosen from step to step.
AUTO_DRAFTS = 7
# What speculation.method may be.
METHODS = ("none", "ngram", "suffix", "draft", "eagle3", "mtp", "prediction")
# Those whose drafts the host makes: they leave room for what a request predicts of its answer.
HOST_METHODS = ("ngram", "suffix", "prediction")
# Those that take speculation.model, and what it is.
DRAFT_FOLDERS = {"draft": "the model that drafts", "eagle3": "the head that drafts"}


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are filled.

    max_rows: requests that may run at once.
    max_waiting: bound of the queue; a request beyond it is refused with UNAVAILABLE.
    token_budget: tokens one step may compute.
    chunk_size: most prompt tokens of one request in one step; 0 means the whole budget.
    mixed_budget: most prompt tokens, of all requests together, in a step that also holds decoding rows; None goes by
    how many rows decode and how much waits (`engine.core.prefill_policy.PrefillPolicy`).
    preference: "balanced" takes prompts in fast enough to keep all rows busy, in shares that hold decoding rows up
    little; "latency" keeps steps that hold decoding rows shorter still, at the price of a longer wait for the first
    token under load; "throughput" takes in what waits at once, at the price of long gaps between tokens.
    """

    max_rows: Positive = 256
    max_waiting: Positive = 1024
    token_budget: Positive = 8192
    chunk_size: Annotated[int, Meta(ge=0)] = 0
    mixed_budget: Positive | None = None
    preference: Literal["latency", "balanced", "throughput"] = "balanced"

    def __post_init__(self) -> None:
        if self.token_budget < self.max_rows:
            raise ValueError(
                f"token_budget ({self.token_budget}) must be at least max_rows ({self.max_rows}), so that every "
                "running request can advance in every step: raise token_budget or lower max_rows"
            )


# Tables of blocks hold numbers of 32 bits.
MAX_BLOCKS = 2**31 - 1
# Block 0 takes what padding writes, so a pool of one block could hold no token.
MIN_BLOCKS = 2
# What cache.dtype may say, and what it is called then.
CACHE_DTYPES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8", "16bit": "16bit"}


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The block pool.

    dtype: what keys, values and latents are kept as. "fp8" (or "fp8_e4m3") are 8-bit floats with the checkpoint's
    scales, or 1; "16bit" the model's dtype; "auto" what the checkpoint says.
    block_size: tokens a block holds. num_blocks: blocks in the pool; None sizes it from `memory_fraction` of the
    free device memory (on CPU from `cpu_bytes`).
    checkpoint_interval: a model with recurrent layers saves its state for the prefix cache each time generation has
    passed that many tokens (and where a prompt chunk ends on a block); a multiple of block_size.
    """

    dtype: str = "auto"
    block_size: Literal[16, 32, 64, 128] = 16
    num_blocks: Annotated[int, Meta(ge=1, le=MAX_BLOCKS)] | None = None
    memory_fraction: Annotated[float, Meta(gt=0.0, lt=1.0)] = 0.9
    cpu_bytes: Positive = 256 << 20
    prefix_cache: bool = True
    checkpoint_interval: Positive = 256

    def __post_init__(self) -> None:
        if self.dtype not in CACHE_DTYPES:
            raise ValueError(
                f"cache.dtype {self.dtype!r} is not there: it is auto, fp8 (fp8_e4m3) or 16bit"
                + ("; fp8_e5m2 has too few digits for keys and no scales, take fp8" if "e5m2" in self.dtype else "")
            )
        if self.num_blocks is not None and self.num_blocks < MIN_BLOCKS:
            raise ValueError(
                f"cache.num_blocks is {self.num_blocks} and must be {MIN_BLOCKS} or more: one block takes what padding "
                f"writes, and each of the others holds {self.block_size} tokens. Leave it out to size the cache by "
                "memory"
            )
        if self.checkpoint_interval % self.block_size:
            raise ValueError(
                f"checkpoint_interval ({self.checkpoint_interval}) must be a multiple of block_size ({self.block_size})"
            )

    @property
    def storage_dtype(self) -> str:
        """`dtype` by one name: auto, fp8 or 16bit."""
        return CACHE_DTYPES[self.dtype]


class RuntimeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How steps are executed. Each switch is an optimisation that can be turned off without changing tokens.

    device: "auto" takes the GPU if there is one. kernels: "auto" binds references on CPU and kernels on a GPU.
    overlap: prepare step N+1 while step N runs. delay_launch: with overlap, not before step N is about to end, so that
    requests which arrive meanwhile join step N+1. dependent_launch: a kernel starts while the one before it ends.
    graphs: replay captured CUDA graphs for decode steps. budget_graphs: also for steps of many prompt tokens of several
    requests, up to the whole token budget, for memory of one more such step; "auto" where there are experts and every
    layer caches all tokens.
    compile_ahead: compile every kernel that steps can need before the engine is ready, many at once, in other processes
    or in threads of this one; "off" leaves each to the first step that needs it.
    fused_attention: attention of decode rows norms, rotates and writes the new keys itself.
    trim_last_layer: the last layer computes the last token of each entry alone, where nobody asks for prompt_logprobs.
    tuned_gemms: products of many rows take the library's algorithms that were measured to be fastest.
    direct_copies: a step's numbers come from pinned host memory, and its tokens go there, by kernels instead of by a
    copy engine, for which the device waits.
    deterministic: batch-invariant arithmetic; tokens of a request do not depend on what runs beside it. With weights
    and caches of every kind.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kernels: Literal["auto", "reference", "triton"] = "auto"
    overlap: bool = True
    delay_launch: bool = True
    dependent_launch: bool = True
    graphs: bool = True
    budget_graphs: bool | Literal["auto"] = "auto"
    compile_ahead: Literal["processes", "threads", "off"] = "processes"
    fused_attention: bool = True
    trim_last_layer: bool = True
    tuned_gemms: bool = True
    direct_copies: bool = True
    deterministic: bool = False
    # Former names, for one version: None unless they are given.
    late_launch: bool | None = None
    chosen_products: bool | None = None

    def __post_init__(self) -> None:
        for old, new in RENAMED.items():
            value, default = getattr(self, old), self.__struct_defaults__[self.__struct_fields__.index(new)]
            if value is None:
                continue
            if getattr(self, new) not in (default, value):
                raise ValueError(f"runtime.{old} is the former name of runtime.{new}, and they differ: leave {old} out")
            log.warning("runtime.%s is called runtime.%s now; the next version does not take the old name", old, new)
            msgspec.structs.force_setattr(self, new, value)
            msgspec.structs.force_setattr(self, old, None)


class WeightsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights are quantized, and quantized ones used.

    activations: "auto" quantizes the inputs of a quantized projection as its checkpoint says; "16bit" leaves them in
    the model's dtype.
    quantize: None keeps weights as they are stored. "fp8" and "int8" round the projections of a 16-bit checkpoint to 8
    bits with a scale a row while it loads, and their inputs as well; "int4" rounds them to 4 bits with a scale for 32
    inputs, and no inputs. Embedding and head stay as they are.
    fast_accumulation: sums of many rows of 8-bit floats with scales by rows stay in the tensor cores, which keep 14
    bits or so of them, as those of other servers do; off adds them up in float32. Scales by blocks always do that.
    """

    activations: Literal["auto", "16bit"] = "auto"
    quantize: Literal["fp8", "int8", "int4"] | None = None
    fast_accumulation: bool = True


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens proposed ahead of the model, which changes no token of an answer, only how many come in a step.

    method: "ngram" proposes what followed the last tokens before, in the prompt and what the request gave; "suffix"
    that, or what followed most often in what all requests gave; "draft" what a smaller model draws; "eagle3" what a
    head draws that reads the model's hidden states; "mtp" what the checkpoint's own layers for further tokens draw;
    "prediction" what a request says its answer will be, as the first two do as well; "none".
    model: the checkpoint folder of that model, or head.
    tokens: most tokens proposed for a request in a step; None takes 4. "auto" takes up to 7, as many as pay by what
    steps took and what the request's drafts came to.
    quantize: rounds what a 16-bit `model` holds while it loads, as `weights.quantize` does, and its head too: drafts
    are read in less time, and fewer of them may stand.
    """

    method: str = "none"
    tokens: Annotated[int, Meta(ge=1, le=MAX_DRAFTS)] | Literal["auto"] | None = None
    model: str | None = None
    quantize: Literal["fp8", "int8", "int4"] | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"speculation.method {self.method!r} is not there: it is {', '.join(METHODS)}")
        if self.method == "none" and self.tokens is not None:
            raise ValueError(
                f"speculation.tokens is {self.tokens}, but speculation.method is none, so nothing is drafted: set the "
                "method, or leave tokens out"
            )
        if self.method in DRAFT_FOLDERS and not self.model:
            raise ValueError(
                f"speculation.method {self.method} needs speculation.model, the checkpoint folder of "
                f"{DRAFT_FOLDERS[self.method]}"
            )
        if self.method not in DRAFT_FOLDERS and self.model is not None:
            raise ValueError(
                f"speculation.model is for the methods {' and '.join(DRAFT_FOLDERS)}, and speculation.method is "
                f"{self.method}: leave one out"
            )
        if self.method not in DRAFT_FOLDERS and self.quantize is not None:
            raise ValueError(
                "speculation.quantize rounds the checkpoint in speculation.model, and speculation.method "
                f"{self.method} has none: leave it out"
            )

    @property
    def most(self) -> int:
        """Tokens proposed in a step at most; 0 when none are."""
        if self.method == "none":
            return 0
        return AUTO_DRAFTS if self.tokens == "auto" else self.tokens or 4


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many devices share one model.

    tensor: ranks, each a process with a GPU of its own (or without one), that hold a part of every layer.
    expert: "sliced" gives each rank some channels of every routed expert, "whole" some experts with all of their
    channels; "auto" slices where that parts no block, and experts without biases alone.
    context: "whole" keeps the latents of latent attention on every rank; "sliced" gives each rank those of some tokens,
    which holds as many times more.
    all_reduce: "peer" adds up over ranks by kernels of our own, where GPUs of one host reach each other's memory;
    "library" by NCCL; "auto" as "peer", and says nothing where that is not to be had.
    merge_candidates: ranks tell each other which tokens they may draw instead of all logits, where that says enough for
    a step's requests.
    hang_timeout_s: a rank that says nothing for so long, or is so long behind in a step, ends the group.
    """

    tensor: Annotated[int, Meta(ge=1, le=64)] = 1
    expert: Literal["auto", "sliced", "whole"] = "auto"
    context: Literal["whole", "sliced"] = "whole"
    all_reduce: Literal["auto", "library", "peer"] = "auto"
    merge_candidates: bool = True
    hang_timeout_s: Annotated[float, Meta(gt=0.0)] = 60.0

    @property
    def block_shares(self) -> int:
        """Ranks that each keep some tokens of a block."""
        return self.tensor if self.context == "sliced" else 1


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an engine is told. `model` is a Hugging Face checkpoint folder.

    load_format "dummy" fills the weights with seeded random numbers instead of reading them.
    max_model_len None takes the checkpoint's max_position_embeddings.
    tokenizer: the checkpoint folder whose tokens structured output is made of; None takes `model`.
    """

    model: str
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: Positive | None = None
    tokenizer: str | None = None
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    weights: WeightsConfig = WeightsConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    parallel: ParallelConfig = ParallelConfig()
