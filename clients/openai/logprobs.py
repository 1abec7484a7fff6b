"""The engine's log-probabilities in the API's two shapes, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]  # token id -> {logprob, rank, decoded_token}


def _chosen(entry: Entry, token_id: int) -> dict[str, Any]:
    return entry.get(str(token_id)) or next(iter(entry.values()))


def _top(entry: Entry, count: int) -> list[tuple[str, dict[str, Any]]]:
    """(token id, what is said of it), the likeliest first."""
    return sorted(((i, e) for i, e in entry.items() if e["rank"] <= count), key=lambda item: item[1]["rank"])


def _name(token_id: int | str, text: str, as_ids: bool) -> str:
    """How a token is called: by its text, or as vLLM does when it is asked for ids."""
    return f"token_id:{token_id}" if as_ids else text


def completion_logprobs(
    entries: Sequence[Entry | None],
    token_ids: Sequence[int],
    count: int,
    offset: int,
    first_token: str = "",
    as_ids: bool = False,
) -> dict[str, Any]:
    """Text completion's shape: parallel lists. An entry of None is a prompt's first token: it has no probability.

    count: alternatives a token. offset: characters of text before the first token here; a token that goes on with a
    character has that one's place. first_token: the text of a prompt's first token, which no entry holds. as_ids:
    tokens are named by their ids.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    first: Entry = {"decoded_token": first_token, "logprob": None}
    for entry, token_id in zip(entries, token_ids, strict=True):
        chosen = _chosen(entry, token_id) if entry else first
        text = _name(token_id, chosen["decoded_token"], as_ids)
        tokens.append(text)
        values.append(chosen["logprob"])
        if entry is None:
            tops.append(None)
        else:
            named = {_name(i, e["decoded_token"], as_ids): e["logprob"] for i, e in _top(entry, count)}
            tops.append(named | {text: chosen["logprob"]})
        offsets.append(max(0, offset - _goes_on(chosen)))
        offset += _begun(chosen)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def num_characters(entries: Sequence[Entry], token_ids: Sequence[int]) -> int:
    """Characters of text that begin in these tokens."""
    return sum(_begun(_chosen(entry, token_id)) for entry, token_id in zip(entries, token_ids, strict=True))


def _begun(token: dict[str, Any]) -> int:
    """Characters that begin in a token. The bytes of one with a part of a character tell; all but a character's first
    are 10xxxxxx in UTF-8."""
    data: list[int] | None = token.get("bytes")
    return len(token["decoded_token"]) if data is None else sum(byte & 0xC0 != 0x80 for byte in data)


def _goes_on(token: dict[str, Any]) -> bool:
    """Whether a token begins within a character."""
    data: list[int] = token.get("bytes") or []
    return len(data) > 0 and data[0] & 0xC0 == 0x80


def chat_logprobs(
    entries: Sequence[Entry], token_ids: Sequence[int], count: int, as_ids: bool = False
) -> dict[str, Any]:
    """Chat's shape: one object a token with its alternatives. as_ids: tokens are named by their ids."""
    content = []
    for entry, token_id in zip(entries, token_ids, strict=True):
        token = _chat_token(token_id, _chosen(entry, token_id), as_ids)
        token["top_logprobs"] = [_chat_token(i, e, as_ids) for i, e in _top(entry, count)]
        content.append(token)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int | str, entry: dict[str, Any], as_ids: bool) -> dict[str, Any]:
    text = entry["decoded_token"]
    # U+FFFD stands for a part of a character: its bytes come by themselves, where the tokenizer has them.
    return {
        "token": _name(token_id, text, as_ids),
        "logprob": entry["logprob"],
        "bytes": entry.get("bytes") if "\ufffd" in text else list(text.encode()),
    }
