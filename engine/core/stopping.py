"""When a request ends by its tokens: end of sequence, stop tokens, length. Stop strings are matched on text, by the
frontend, which then aborts the request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.request import Request
from engine.types import FinishReason, SamplingParams

End = tuple[FinishReason, "int | None"]


def stop_ids(params: SamplingParams, eos_ids: Iterable[int]) -> frozenset[int]:
    """Tokens that end a request. ignore_eos takes out the model's own, never those that the client asked for."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))


def length_limit(num_prompt: int, params: SamplingParams, context: int) -> int:
    """Tokens, prompt included, at which a request ends for length."""
    return min(num_prompt + params.max_tokens, context)


def completed(request: Request) -> bool:
    """Whether the last token of `request` completes what its answer must be, and is no end of sequence."""
    return request.matcher is not None and request.matcher.ended and request.tokens[-1] not in request.eos_ids


def count_until_end(request: Request, tokens: Sequence[int]) -> int:
    """How many of `tokens` the request would take by stop tokens and length: all, or up to the one that ends it."""
    for count, token in enumerate(tokens, 1):
        held = request.num_tokens + count
        if held >= request.limit or (token in request.stop_ids and held >= request.min_length):
            return count
    return len(tokens)


def check(request: Request) -> End | None:
    """Whether the last token of `request` ends it: the reason, and the token's id when the client named it as a stop
    token. A stop token counts once min_tokens are reached (before that the sampler suppresses it); an answer that is
    complete ends whatever min_tokens says."""
    token = request.tokens[-1]
    if request.matcher is not None and request.matcher.ended:
        return FinishReason.STOP, None
    if token in request.stop_ids and request.num_tokens >= request.min_length and request.num_output:
        named = token in request.input.params.stop_token_ids
        return FinishReason.STOP, token if named else None
    if request.num_tokens >= request.limit:
        return FinishReason.LENGTH, None
    return None
