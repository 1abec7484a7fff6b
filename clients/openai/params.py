"""A request's fields as the engine's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from clients.openai.errors import invalid
from clients.openai.schema import Sampling
from clients.openai.wire import ModelInfo
from engine.types import Constraint, SamplingParams, derive_seed

_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "priority",
    "speculation",
    "prompt_logprobs",
    "cache_salt",
)
_MAX_TOKENS = SamplingParams().max_tokens
_OF_BEAMS = ("length_penalty", "early_stopping")


def check_length(info: ModelInfo, name: str, wanted: int | None) -> None:
    """Raises ApiError when field `name` asks for more tokens than the model holds with any prompt."""
    if wanted is not None and info.max_model_len is not None and wanted >= info.max_model_len:
        raise invalid(
            name,
            f"`{name}` is too large: {wanted}. The context of `{info.name}` holds {info.max_model_len} tokens, prompt "
            f"and answer together, so at most {info.max_model_len - 1} can be asked for; leave it out to write to the "
            "end of the context.",
        )


def sampling_fields(
    request: Sampling,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    choice: int,
    constraint: Constraint | None = None,
    predicted: Sequence[int] = (),
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The JSON of sampling_parameters but for its timeout. Only what was asked for is in it, and the model's own
    sampling (`defaults`) where the request says nothing; the engine has the other defaults."""
    fields: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(request, name)) not in (None, [])}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if logprobs is not None:
        fields["logprobs"] = logprobs
    if request.top_k is not None and request.top_k > 0:
        fields["top_k"] = request.top_k
    if request.stop:
        fields["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop
    if request.logit_bias:
        fields["logit_bias"] = request.logit_bias
    if predicted:
        # A request that wants no drafts has none.
        fields.setdefault("speculation", {"method": "prediction", "token_ids": list(predicted)})
    if constraint is not None:
        fields["structured_outputs"] = msgspec.to_builtins(constraint)
    if request.beams:
        fields |= {"use_beam_search": True, "n": request.num_choices, "best_of": request.beams}
        fields |= {name: value for name in _OF_BEAMS if (value := getattr(request, name)) is not None}
    for name, value in (defaults or {}).items():
        if name == "max_tokens":
            fields[name] = min(value, fields.get(name, _MAX_TOKENS))
        elif not request.beams and getattr(request, name) is None:
            fields[name] = value
    if request.seed is not None:
        fields["seed"] = derive_seed(request.seed, choice)
    return fields
