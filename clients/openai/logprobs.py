"""The engine's log-probabilities in the API's two shapes, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]  # token id -> {logprob, rank, decoded_token}


def _chosen(entry: Entry, token_id: int) -> dict[str, Any]:
    return entry.get(str(token_id)) or next(iter(entry.values()))


def _top(entry: Entry, count: int) -> list[dict[str, Any]]:
    return sorted((e for e in entry.values() if e["rank"] <= count), key=lambda e: e["rank"])


def completion_logprobs(
    entries: Sequence[Entry | None], token_ids: Sequence[int], count: int, offset: int, first_token: str = ""
) -> dict[str, Any]:
    """Text completion's shape: parallel lists. An entry of None is a prompt's first token: it has no probability.

    count: alternatives a token. offset: characters of text before the first token here; a token that goes on with a
    character has that one's place. first_token: the text of a prompt's first token, which no entry holds.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    first: Entry = {"decoded_token": first_token, "logprob": None}
    for entry, token_id in zip(entries, token_ids, strict=True):
        chosen = _chosen(entry, token_id) if entry else first
        text = chosen["decoded_token"]
        tokens.append(text)
        values.append(chosen["logprob"])
        if entry is None:
            tops.append(None)
        else:
            tops.append({e["decoded_token"]: e["logprob"] for e in _top(entry, count)} | {text: chosen["logprob"]})
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


def chat_logprobs(entries: Sequence[Entry], token_ids: Sequence[int], count: int) -> dict[str, Any]:
    """Chat's shape: one object a token with its alternatives."""
    content = []
    for entry, token_id in zip(entries, token_ids, strict=True):
        token = _chat_token(_chosen(entry, token_id))
        token["top_logprobs"] = [_chat_token(e) for e in _top(entry, count)]
        content.append(token)
    return {"content": content, "refusal": None}


def _chat_token(entry: dict[str, Any]) -> dict[str, Any]:
    text = entry["decoded_token"]
    # U+FFFD stands for a part of a character: its bytes come by themselves, where the tokenizer has them.
    return {
        "token": text,
        "logprob": entry["logprob"],
        "bytes": entry.get("bytes") if "\ufffd" in text else list(text.encode()),
    }
