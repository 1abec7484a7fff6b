"""Rotary embedding as config.json files describe it, and the positions that a model can be served with."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

from engine.models.config import RopeConfig
from engine.models.reader import LARGEST_POSITION, ConfigError, Reader, shown

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def from_config(reader: Reader, head_dim: int, *, partial: bool = False, interleaved: bool = False) -> RopeConfig:
    """Rotary embedding, from `rope_theta` + `rope_scaling` or from `rope_parameters` (transformers 5).

    `partial` families may rotate a part of a head alone. Raises ConfigError for a rope type or parameter that is not
    implemented.
    """
    where, given = values(reader)
    numbers = {"rope_theta": reader.positive("rope_theta", 10000.0), **given}
    outer = reader.optional(float, "partial_rotary_factor")
    if outer is not None:
        numbers.setdefault("partial_rotary_factor", outer)
    return scaled(Reader(numbers, where), head_dim, max_position(reader), partial=partial, interleaved=interleaved)


def values(reader: Reader) -> tuple[str, dict[str, Any]]:
    """What `rope_scaling` or `rope_parameters` holds, and where. Raises ConfigError when both hold something else."""
    given = {key: held for key in ("rope_scaling", "rope_parameters") if (held := reader.optional(dict, key))}
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise ConfigError(f"{reader.where}: rope_scaling and rope_parameters say different things; keep one of them")
    for key, held in given.items():
        return f"{reader.where}: {key}", held
    return reader.where, {}


def scaled(
    reader: Reader, head_dim: int, max_position: int, *, partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Rotary embedding from one object that holds all of it; `partial` as in `from_config`."""
    named = {kind for key in ("rope_type", "type") if (kind := reader.optional(str, key)) is not None}
    if len(named) > 1:
        raise ConfigError(f"{reader.where} names two rope types: {', '.join(map(shown, sorted(named)))}; keep one")
    kind = named.pop() if named else "default"
    if kind not in ROPE_KINDS:
        raise ConfigError(
            f"{reader.where}: rope type {shown(kind)} is not implemented; implemented: {', '.join(ROPE_KINDS)}"
        )
    if not partial:
        reader.require("partial_rotary_factor", 1, default=1)
    rotary_dim = int(head_dim * reader.positive("partial_rotary_factor", 1.0))
    reader.check(
        rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim,
        f"{rotary_dim} of a head's {head_dim} channels are to be rotated, which must be an even number of them",
    )
    theta = reader.positive("rope_theta")
    factor = 1.0 if kind == "default" else reader.positive("factor")
    numbers: dict[str, Any] = {}
    if kind in ("llama3", "yarn"):
        length = reader.size("original_max_position_embeddings", max_position, most=LARGEST_POSITION)
        numbers["original_max_position"] = length
    if kind == "llama3":
        low, high = reader.positive("low_freq_factor"), reader.positive("high_freq_factor")
        reader.check(low < high, f"high_freq_factor = {high} must be greater than low_freq_factor = {low}")
        numbers |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        reader.check(theta != 1.0, "rope_theta = 1 gives every channel the same wave, which YaRN cannot stretch")
        numbers["beta_fast"] = reader.positive("beta_fast", 32.0)
        numbers["beta_slow"] = reader.positive("beta_slow", 1.0)
        numbers["truncate"] = reader.read(bool, "truncate", True)
        numbers["attention_factor"] = _yarn_attention_factor(reader, factor)
    # DeepSeek and Qwen repeat these beside a scaling that does not use them.
    reader.skip("original_max_position_embeddings", "finetuned", "factor")
    # Time, height and width of a text token are the same position, however the channels are dealt out to them.
    reader.skip("mrope_section", "mrope_interleaved")
    reader.finish()
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        interleaved=interleaved,
        kind=cast("Literal['default', 'linear', 'llama3', 'yarn']", kind),
        factor=factor,
        **numbers,
    )


def _yarn_attention_factor(reader: Reader, factor: float) -> float:
    """Factor on cos and sin (YaRN, arXiv:2309.00071, eq. 22; the two-scale form is DeepSeek-V2's). `attn_factor`, which
    DeepSeek-R1-0528-Qwen3-8B has, multiplies it, as vLLM takes it; transformers overlooks it."""

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    given = reader.positive("attention_factor", None)
    mscale, mscale_all_dim = reader.read(float, "mscale", 0.0), reader.read(float, "mscale_all_dim", 0.0)
    beside = reader.positive("attn_factor", 1.0)
    if given is not None:
        reader.check(
            beside == 1.0, "attention_factor and attn_factor both say what cos and sin are multiplied by; keep one"
        )
        return given
    return beside * (scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0))


def max_position(reader: Reader) -> int:
    """Positions that the model was made for, which configs of 2023 may call otherwise too."""
    said = reader.size("max_sequence_length", None, most=LARGEST_POSITION)
    if said is None or "max_position_embeddings" in reader:
        whole = reader.size("max_position_embeddings", most=LARGEST_POSITION)
        return whole if said is None else min(whole, said)
    return said


def reachable_positions(reader: Reader, rotary: RopeConfig | None) -> int:
    """Positions that the model can be served with: YaRN stretches the original range, others say it all."""
    said = max_position(reader)
    if rotary is None or rotary.kind != "yarn":
        return said
    return min(max(said, int(rotary.original_max_position * rotary.factor)), LARGEST_POSITION)
