"""Edits of logits that few requests ask for: logit_bias, min_tokens, allowed_token_ids and bad_words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.plan import RowStart

BANNED = float("-inf")


def sent(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Values on their way to the device. On a GPU from pinned memory, so that nobody waits for the steps before."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class RowEdits:
    """The edits of one row, made when it starts."""

    def __init__(self, start: RowStart, device: torch.device) -> None:
        params = start.params
        self.num_prompt = start.num_prompt
        self.min_tokens = params.min_tokens
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32)
        self.ending_ids = np.array(sorted({*start.eos_ids, *params.stop_token_ids}), np.int64)
        allowed = params.allowed_token_ids
        self.allowed = sent(np.array(allowed, np.int64), device) if allowed else None
        self.words = BadWords.of(start.bad_word_ids, device)

    def touch(self, length: int) -> bool:
        """Whether they change anything for a row that holds `length` tokens. Once they do not, they never do again."""
        fixed = len(self.bias_ids) or self.allowed is not None or self.words is not None
        return bool(fixed) or length - self.num_prompt < self.min_tokens

    def biases(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and what is added to their logits, for a row that holds `length` tokens."""
        if length - self.num_prompt >= self.min_tokens:
            return self.bias_ids, self.bias_values
        banned = np.full(len(self.ending_ids), BANNED, np.float32)
        return np.concatenate((self.bias_ids, self.ending_ids)), np.concatenate((self.bias_values, banned))


@dataclass(frozen=True, slots=True)
class BadWords:
    """Token sequences that must not be completed: all but the last token, right-aligned and padded by −1, and the last.

    prefixes [W, P] int32, last [W] int64. As in vLLM, only generated tokens are matched.
    """

    prefixes: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, words: Sequence[Sequence[int]], device: torch.device) -> BadWords | None:
        words = [word for word in words if word]
        if not words:
            return None
        longest = max(len(word) for word in words) - 1
        prefixes = [[-1] * (longest - len(word) + 1) + list(word[:-1]) for word in words]
        return cls(
            sent(np.array(prefixes, np.int32).reshape(len(words), longest), device),
            sent(np.array([word[-1] for word in words], np.int64), device),
        )

    def ban(self, logits: torch.Tensor, tokens: torch.Tensor, num_prompt: int, length: int) -> None:
        """logits [V], changed in place; tokens [L] int32, of which [num_prompt, length) were generated."""
        size = self.prefixes.shape[1]
        places = torch.arange(length - size, length, device=tokens.device)
        tail = torch.where(places >= num_prompt, tokens[places.clamp(min=0)], -2)
        complete = ((self.prefixes == tail) | (self.prefixes == -1)).all(dim=1)
        logits.index_add_(0, self.last, torch.where(complete, BANNED, 0.0))


@dataclass(frozen=True, slots=True)
class LineEdits:
    """The edits of a step's line that holds `length` tokens. tokens [L] int32 are those of its row."""

    line: int
    length: int
    row: RowEdits
    tokens: torch.Tensor


def edit(logits: torch.Tensor, edits: Sequence[LineEdits]) -> None:
    """Apply edits to logits [B, V] float32 in place."""
    lines, ids, values = [], [], []
    for of in edits:
        line, row = of.line, of.row
        if row.allowed is not None:
            kept = logits[line, row.allowed]
            logits[line] = BANNED
            logits[line, row.allowed] = kept
        if row.words is not None:
            row.words.ban(logits[line], of.tokens, row.num_prompt, of.length)
        more_ids, more_values = row.biases(of.length)
        lines.append(np.full(len(more_ids), line, np.int64))
        ids.append(more_ids)
        values.append(more_values)
    if sum(map(len, ids)):
        at = sent(np.stack((np.concatenate(lines), np.concatenate(ids))), logits.device)
        logits.index_put_((at[0], at[1]), sent(np.concatenate(values), logits.device), accumulate=True)
