"""Typed reading of a config.json that notices what nobody read: a value that is not implemented is never ignored."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar, cast, overload

T = TypeVar("T")

_MISSING: Any = object()

# The largest count, width or length of a list that a config may give; positions go further.
LARGEST = 1 << 20
LARGEST_POSITION = (1 << 31) - 1

# Defaults of generation, which transformers once kept in config.json and leaves out of account there since:
# its GenerationConfig and what that once held.
GENERATION = frozenset(
    {
        "assistant_confidence_threshold",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "cache_config",
        "cache_implementation",
        "compile_config",
        "constraints",
        "continuous_batching_config",
        "decoder_start_token_id",
        "disable_compile",
        "diversity_penalty",
        "do_sample",
        "dola_layers",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "force_words_ids",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "guidance_scale",
        "is_assistant",
        "length_penalty",
        "low_memory",
        "max_cache_len",
        "max_length",
        "max_matching_ngram_size",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_logits",
        "output_scores",
        "penalty_alpha",
        "prefill_chunk_size",
        "prefix",
        "prompt_lookup_num_tokens",
        "remove_invalid_values",
        "renormalize_logits",
        "repetition_penalty",
        "return_dict_in_generate",
        "sep_token_id",
        "sequence_bias",
        "speculation_type",
        "stop_strings",
        "suppress_tokens",
        "target_lookbehind",
        "task_specific_params",
        "temperature",
        "token_healing",
        "tokenizer_class",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
        "use_mtp",
        "watermarking_config",
    }
)

# Keys that say nothing about what the model computes: bookkeeping, training, special tokens of the text side and
# defaults of generation. So does every key with an underscore in front, which programs write for themselves.
METADATA = GENERATION | frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cls_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "id2label",
        "is_decoder",
        "is_llama_config",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "mask_token_id",
        "model_type",
        "name_or_path",
        "neftune_noise_alpha",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "tf_legacy_loss",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

# What every kind of transformer may say of itself, and a decoder of tokens says no to.
NOT_A_DECODER = ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "pruned_heads")


class ConfigError(ValueError):
    """A checkpoint's configuration that cannot be served. The message names the key and says what to do."""


class Reader:
    """Reads one JSON object key by key. JSON null counts as absent, except to `assume`.

    `where` names the object in messages ("config.json", "config.json: rope_scaling").
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.where = where
        self._given = frozenset(values)
        self._values = {key: value for key, value in values.items() if value is not None}
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def assume(self, **values: Any) -> None:
        """What the family takes for keys that the object leaves out; null is not left out."""
        self._values = {**{key: value for key, value in values.items() if key not in self._given}, **self._values}

    def read(self, kind: type[T], key: str, default: T = _MISSING) -> T:
        """The value of `key` as `kind`; an int passes for a float, a bool never for an int.

        Raises ConfigError when the key is absent and no default is given, when its type is another, and for a float
        that is no finite number.
        """
        self._used.add(key)
        if key not in self._values:
            if default is _MISSING:
                of_kind = "" if kind is object else f" ({kind.__name__})"
                raise ConfigError(f"{self.where} lacks {key}, which this model needs{of_kind}")
            return default
        value = self._values[key]
        if kind is float:
            if type(value) in (int, float) and abs(value) <= sys.float_info.max:
                return cast(T, float(value))
            raise ConfigError(f"{self.where}: {key} = {shown(value)} must be a finite number")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} = {shown(value)} must be of type {kind.__name__}")
        return value

    @overload
    def size(self, key: str, default: int = ..., *, least: int = ..., most: int = ...) -> int: ...

    @overload
    def size(self, key: str, default: None, *, least: int = ..., most: int = ...) -> int | None: ...

    def size(self, key: str, default: int | None = _MISSING, *, least: int = 1, most: int = LARGEST) -> int | None:
        """The value of `key`, an int from `least` to `most`. Raises ConfigError as `read`, and for any other number."""
        value = self.read(int, key, cast(int, default))
        if key in self._values:
            self.check(least <= value <= most, f"{key} = {shown(value)} must be an integer from {least} to {most}")
        return value

    @overload
    def positive(self, key: str, default: float = ...) -> float: ...

    @overload
    def positive(self, key: str, default: None) -> float | None: ...

    def positive(self, key: str, default: float | None = _MISSING) -> float | None:
        """The value of `key`, a number above 0. Raises ConfigError as `read`, and for any other number."""
        value = self.read(float, key, cast(float, default))
        if key in self._values:
            self.check(value > 0, f"{key} = {value!r} must be greater than 0")
        return value

    def check(self, fits: bool, sentence: str) -> None:
        """Raises ConfigError with `sentence`, which names keys and values and says what they must be, unless `fits`."""
        if not fits:
            raise ConfigError(f"{self.where}: {sentence}")

    def items(self, kind: type[T], key: str) -> list[T] | None:
        """The list of `key`, each item of `kind`, or None when it is absent or null."""
        items = self.optional(list, key)
        for item in items or ():
            fits = isinstance(item, kind) and not (kind is int and isinstance(item, bool))
            self.check(fits, f"{key} holds {shown(item)}, which must be of type {kind.__name__}")
        return items

    def optional(self, kind: type[T], key: str) -> T | None:
        """The value of `key`, or None when it is absent or null."""
        self._used.add(key)
        return self.read(kind, key) if key in self._values else None

    def skip(self, *keys: str) -> None:
        """Mark keys as understood and without effect here."""
        self._used.update(keys)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them, each below `vocab_size`; empty when absent."""
        value = self.read(object, key, ())
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        fits = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids)
        self.check(fits, f"{key} = {shown(value)} must be a token id below {vocab_size}, or a list of them")
        return cast("tuple[int, ...]", ids)

    def require(self, key: str, *allowed: object, default: object = _MISSING) -> Any:
        """The value of `key`, which must be one of those that are implemented (absent takes `default`).

        Raises ConfigError that names the key, its value and the implemented values.
        """
        value = self.read(object, key, default)
        if value not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise ConfigError(f"{self.where}: {key} = {shown(value)} is not implemented; implemented: {choices}")
        return value

    def refuse(self, key: str, why: str, *harmless: object) -> None:
        """Refuse `key` unless it is absent, null or one of the `harmless` values."""
        self._used.add(key)
        if key in self._values and self._values[key] not in harmless:
            raise ConfigError(f"{self.where}: {key} = {shown(self._values[key])} is not implemented: {why}")

    def child(self, key: str, *inherited: str) -> Reader | None:
        """A nested object, or None when it is absent. The caller finishes it as well. What this object says of
        `inherited` keys holds for the nested one."""
        values = self.optional(dict, key)
        if values is None:
            return None
        self.skip(*inherited)
        ours = {name: self._values[name] for name in inherited if name in self._values}
        return Reader({**values, **ours}, f"{self.where}: {key}")

    def finish(self) -> None:
        """Raises ConfigError that lists every key that was neither read nor is mere metadata."""
        for key in NOT_A_DECODER:
            self.refuse(key, "a decoder of tokens is served", False, {})
        left = sorted(key for key in set(self._values) - self._used - METADATA if not key.startswith("_"))
        if left:
            listed = ", ".join(f"{key} = {shown(self._values[key])}" for key in left)
            raise ConfigError(
                f"{self.where} holds values that are not implemented for this model: {listed}. "
                "Serving it without them could give wrong tokens; remove them if the model does not need them"
            )


def shown(value: object, most: int = 80) -> str:
    """A value for a message, cut when it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
