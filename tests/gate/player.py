"""Plays the gate's sequences through the engine as any client would: greedy requests with log-probabilities.

The forced tokens are the oracle's own greedy ones, so a right engine mostly stays on them by itself. Where it draws
another one (a near tie in bfloat16), the rest is asked for again with the forced tokens as `output_ids`, the way a
request is replayed after a restart.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.api import Engine, Generation
from engine.types import FinishReason, RequestInput, SamplingParams, TokenLogprobs
from tests.gate.oracle import FORCED, Sequence
from tests.gate.verdict import NUM_LOGPROBS

PARAMS = SamplingParams(max_tokens=FORCED + 1, temperature=0.0, ignore_eos=True, logprobs=NUM_LOGPROBS)


class EnginePlayer:
    """`cached` holds the prompt tokens that each sequence of the last `play` took from the prefix cache.

    `beside` are requests that are submitted before the sequences and run beside them.
    """

    def __init__(self, engine: Engine, beside: Seq[RequestInput] = ()) -> None:
        self.engine = engine
        self.beside = list(beside)
        self.cached: list[int] = []

    def play(self, sequences: Seq[Sequence]) -> list[list[TokenLogprobs]]:
        """All sequences at once: log-probabilities at the FORCED + 1 positions of each."""
        heard: list[list[TokenLogprobs]] = [[] for _ in sequences]
        rounds = 0
        while live := [i for i, entries in enumerate(heard) if len(entries) <= FORCED]:
            inputs = [self._input(f"{rounds}-{i}", sequences[i], len(heard[i])) for i in live]
            beside = self.beside if rounds == 0 else []
            results = self.engine.generate(beside + inputs)[len(beside) :]
            if rounds == 0:
                self.cached = [result.num_cached for result in results]
            for i, result in zip(live, results, strict=True):
                heard[i] += on_path(result, sequences[i].forced[len(heard[i]) :])
            rounds += 1
        return heard

    def _input(self, name: str, sequence: Sequence, done: int) -> RequestInput:
        return RequestInput(
            request_id=name, prompt_ids=sequence.prompt, params=PARAMS, output_ids=sequence.forced[:done]
        )


def on_path(result: Generation, forced: list[int]) -> list[TokenLogprobs]:
    """What a generation says up to and including its first token off the forced path."""
    assert result.finish_reason is FinishReason.LENGTH, result.error
    assert len(result.token_ids) == len(result.logprobs) == len(forced) + 1
    same = [a == b for a, b in zip(result.token_ids, forced, strict=False)]
    return result.logprobs[: same.index(False) + 1 if False in same else None]
