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

    count: alternatives a token. offset: characters of text before the first token here. first_token: the text of a
    prompt's first token, which no entry holds.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry, token_id in zip(entries, token_ids, strict=True):
        chosen = _chosen(entry, token_id) if entry else None
        text = chosen["decoded_token"] if chosen else first_token
        tokens.append(text)
        values.append(chosen["logprob"] if chosen else None)
        if entry is None or chosen is None:
            tops.append(None)
        else:
            tops.append({e["decoded_token"]: e["logprob"] for e in _top(entry, count)} | {text: chosen["logprob"]})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


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
