"""Edits of logits that few requests ask for: logit_bias, min_tokens, allowed_token_ids and bad_words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.plan import RowStart
from engine.parallel.vocabulary import Vocabulary
from engine.types import MAX_ALLOWED_IDS, MAX_BAD_WORD_IDS

BANNED = float("-inf")
_ALWAYS = np.iinfo(np.int32).max
# Ids that the edits of one row read on the device: allowed tokens, then three for each token of a bad word.
EDIT_IDS = MAX_ALLOWED_IDS + 3 * MAX_BAD_WORD_IDS


def sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Values on their way to the device. On a GPU from pinned memory, so that nobody waits for the steps before."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class RowEdits:
    """The edits of one row, made when it starts: of the tokens that this rank holds, by their places in its logits.
    id_buffer [EDIT_IDS] int64: the row's own place on the device for ids."""

    def __init__(self, start: RowStart, id_buffer: torch.Tensor, vocabulary: Vocabulary) -> None:
        params, first = start.params, vocabulary.start
        self.num_prompt = start.num_prompt
        self.min_tokens = params.min_tokens
        self._lasting = bool(params.logit_bias or params.allowed_token_ids or any(start.bad_word_ids))
        bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        bias_values = np.fromiter(params.logit_bias.values(), np.float32)
        self.bias_ids, self.bias_values = vocabulary.local(bias_ids), bias_values[vocabulary.holds(bias_ids)]
        self.ending_ids = vocabulary.local(np.array(sorted({*start.eos_ids, *params.stop_token_ids}), np.int64))
        allowed = vocabulary.local(np.array(params.allowed_token_ids, np.int64))
        own = [word for word in start.bad_word_ids if word and vocabulary.holds(np.array(word[-1]))]
        last, *before = flat(own)
        words = (last - first, *before)
        ids = np.concatenate((allowed, *words))
        if len(ids):
            id_buffer[: len(ids)].copy_(sent(ids, id_buffer.device), non_blocking=True)
        counts = (len(allowed), *map(len, words))
        parts = id_buffer[: len(ids)].split(counts)
        self.allowed = parts[0] if params.allowed_token_ids else None
        self.words = BadWords(*parts[1:]) if counts[1] else None

    def touch(self, length: int) -> bool:
        """Whether they change anything for a row that holds `length` tokens, on any rank. Once they do not, they never
        do again."""
        return self._lasting or length - self.num_prompt < self.min_tokens

    def biases(self, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, what is added to their logits, and the tokens of the row from which on it is not, for a row that
        holds `length` tokens or more."""
        ids, values = self.bias_ids, self.bias_values
        below = np.full(len(ids), _ALWAYS, np.int32)
        least = self.num_prompt + self.min_tokens
        if length >= least:
            return ids, values, below
        count = len(self.ending_ids)
        banned, until = np.full(count, BANNED, np.float32), np.full(count, least, np.int32)
        return (
            np.concatenate((ids, self.ending_ids)),
            np.concatenate((values, banned)),
            np.concatenate((below, until)),
        )


def flat(words: Sequence[Sequence[int]]) -> tuple[np.ndarray, ...]:
    """Token sequences as the four fields of BadWords, int64."""
    words = [word for word in words if word]
    last = [word[-1] for word in words]
    prefix = [token for word in words for token in word[:-1]]
    back = [places for word in words for places in range(len(word) - 1, 0, -1)]
    of = [number for number, word in enumerate(words) for _ in word[:-1]]
    return tuple(np.array(values, np.int64) for values in (last, prefix, back, of))


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not be completed. As in vLLM, only generated tokens are matched.

    last [W] int64: the last token of each. prefix, back, of [P] int64: every token before a last one, how many places
    before the next token it stands, and of which word it is.
    """

    last: torch.Tensor
    prefix: torch.Tensor
    back: torch.Tensor
    of: torch.Tensor

    def ban(self, logits: torch.Tensor, tokens: torch.Tensor, num_prompt: int, length: torch.Tensor) -> None:
        """logits [V], changed in place; tokens [L] int32, of which [num_prompt, length) were generated; length []."""
        places = length - self.back
        found = torch.where(places >= num_prompt, tokens[places.clamp(min=0)].long(), -1)
        wrong = torch.zeros_like(self.last).index_add_(0, self.of, (found != self.prefix).long())
        logits.index_add_(0, self.last, torch.where(wrong == 0, BANNED, 0.0))


@dataclass(frozen=True, slots=True)
class EntryEdits:
    """The edits of a step's entry that holds `least` tokens at least. tokens [L] int32 are those of its row."""

    entry: int
    least: int
    row: RowEdits
    tokens: torch.Tensor


def edit(logits: torch.Tensor, edits: Sequence[EntryEdits], lengths: torch.Tensor) -> None:
    """Apply edits to logits [B, V] float32 in place, of entries that hold lengths [B] int32 tokens."""
    entries, ids, values, below = [], [], [], []
    for of in edits:
        entry, row = of.entry, of.row
        if row.allowed is not None:
            kept = logits[entry, row.allowed]
            logits[entry] = BANNED
            logits[entry, row.allowed] = kept
        if row.words is not None:
            row.words.ban(logits[entry], of.tokens, row.num_prompt, lengths[entry])
        more = row.biases(of.least)
        entries.append(np.full(len(more[0]), entry, np.int64))
        ids.append(more[0])
        values.append(more[1])
        below.append(more[2])
    if sum(map(len, ids)):
        at = sent(np.stack((np.concatenate(entries), np.concatenate(ids))), logits.device)
        until = sent(np.concatenate(below), logits.device)
        added = sent(np.concatenate(values), logits.device)
        added = torch.where(lengths[at[0]] < until, added, 0.0)
        logits.index_put_((at[0], at[1]), added, accumulate=True)
