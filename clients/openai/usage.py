"""Token counts of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clients.openai.wire import Piece
from engine.speculation.prediction import Alignment


class Usage:
    """Counts as they grow. A prompt counts once however many choices it has; so do its cached tokens."""

    def __init__(self, candidates: int) -> None:
        """candidates: answers to a prompt."""
        self._candidates = candidates
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._seen: set[int] = set()
        self._predicted: Sequence[int] = ()
        self._alignments: dict[int, Alignment] = {}
        self.completion_tokens = 0

    def predict(self, token_ids: Sequence[int]) -> None:
        """Count as well what of these each answer gives."""
        self._predicted = token_ids

    def add(self, piece: Piece) -> None:
        """Count a piece. What it says of its prompt is the same on each piece of a generation."""
        self.completion_tokens += len(piece.token_ids)
        if self._predicted:
            alignment = self._alignments.setdefault(piece.index, Alignment(self._predicted))
            for token in piece.token_ids:
                alignment.take(token)
        if piece.index in self._seen:
            return
        self._seen.add(piece.index)
        prompt = piece.index // self._candidates
        self._prompts[prompt] = piece.num_input
        # The candidate that came first computed the prompt; what the others took from it was not there before.
        self._cached[prompt] = min(self._cached.get(prompt, piece.num_cached), piece.num_cached)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    def body(self) -> dict[str, Any]:
        body = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._predicted:
            matched = sum(alignment.num_matched for alignment in self._alignments.values())
            rejected = len(self._alignments) * len(self._predicted) - matched
            details = {"accepted_prediction_tokens": matched, "rejected_prediction_tokens": rejected}
            body["completion_tokens_details"] = details
        return body
