"""Token counts of a request."""

from __future__ import annotations

from typing import Any


class Usage:
    """Counts as they grow. A prompt counts once however many choices it has; so do its cached tokens."""

    def __init__(self, candidates: int) -> None:
        self._candidates = candidates
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._generated: dict[int, int] = {}

    def add(self, index: int, num_input: int, num_cached: int, num_generated: int) -> None:
        """Counts from one piece of generation `index`; num_input and num_cached are totals, num_generated is new."""
        prompt, place = divmod(index, self._candidates)
        if num_input:
            self._prompts[prompt] = num_input
        if place == 0 and num_cached:
            self._cached[prompt] = num_cached
        self._generated[index] = self._generated.get(index, 0) + num_generated

    @property
    def prompt_tokens(self) -> int:
        return sum(self._prompts.values())

    @property
    def completion_tokens(self) -> int:
        return sum(self._generated.values())

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
