"""Typed reading of a config.json that notices what nobody read: a value that is not implemented is never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")

_MISSING: Any = object()

# Keys that say nothing about what the model computes: bookkeeping, training and generation defaults.
METADATA = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "model_type",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


class ConfigError(ValueError):
    """A checkpoint's configuration that cannot be served. The message names the key and says what to do."""


class Reader:
    """Reads one JSON object key by key. JSON null counts as absent.

    `where` names the object in messages ("config.json", "config.json: rope_scaling").
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.where = where
        self._values = {key: value for key, value in values.items() if value is not None}
        self._used: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def read(self, kind: type[T], key: str, default: T = _MISSING) -> T:
        """The value of `key` as `kind`; an int passes for a float, a bool never for an int.

        Raises ConfigError when the key is absent and no default is given, or when its type is another.
        """
        self._used.add(key)
        if key not in self._values:
            if default is _MISSING:
                raise ConfigError(f"{self.where} lacks {key}, which this model needs ({kind.__name__})")
            return default
        value = self._values[key]
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return cast(T, float(value))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{self.where}: {key} = {value!r} must be of type {kind.__name__}")
        return value

    def optional(self, kind: type[T], key: str) -> T | None:
        """The value of `key`, or None when it is absent or null."""
        self._used.add(key)
        return self.read(kind, key) if key in self._values else None

    def assume(self, **values: Any) -> None:
        """What absent keys stand for: defaults of the family that its published configs leave out."""
        self._values = {**values, **self._values}

    def skip(self, *keys: str) -> None:
        """Mark keys as understood and without effect here."""
        self._used.update(keys)

    def ints(self, key: str) -> tuple[int, ...]:
        """A token id or a list of them; empty when absent."""
        value = self.read(object, key, ())
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise ConfigError(f"{self.where}: {key} = {value!r} must be an integer or a list of integers")
        return cast("tuple[int, ...]", ids)

    def require(self, key: str, *allowed: object, default: object = _MISSING) -> Any:
        """The value of `key`, which must be one of those that are implemented (absent takes `default`).

        Raises ConfigError that names the key, its value and the implemented values.
        """
        value = self.read(object, key, default)
        if value not in allowed:
            choices = ", ".join(repr(a) for a in allowed)
            raise ConfigError(f"{self.where}: {key} = {value!r} is not implemented; implemented: {choices}")
        return value

    def refuse(self, key: str, why: str, *harmless: object) -> None:
        """Refuse `key` unless it is absent, null or one of the `harmless` values."""
        self._used.add(key)
        if key in self._values and self._values[key] not in harmless:
            raise ConfigError(f"{self.where}: {key} = {self._values[key]!r} is not implemented: {why}")

    def child(self, key: str) -> Reader | None:
        """A nested object, or None when it is absent. The caller finishes it as well."""
        values = self.optional(dict, key)
        return None if values is None else Reader(values, f"{self.where}: {key}")

    def finish(self) -> None:
        """Raises ConfigError that lists every key that was neither read nor is mere metadata."""
        left = sorted(set(self._values) - self._used - METADATA)
        if left:
            listed = ", ".join(f"{key} = {self._values[key]!r}" for key in left)
            raise ConfigError(
                f"{self.where} holds values that are not implemented for this model: {listed}. "
                "Serving it without them could give wrong tokens; remove them if the model does not need them"
            )
