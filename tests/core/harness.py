"""Drives an engine step by step on the test's own thread, and checks after each step that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.core.commit import InFlight
from engine.core.request import Drafter
from engine.types import FinishReason, RequestInput, SamplingParams, TokenEvent
from tests.core.scripted_runner import ScriptedRunner, expected_next


def make_request(request_id: str, prompt: Sequence[int], output: Sequence[int] = (), **params: object) -> RequestInput:
    """Greedy, 8 tokens, no end of sequence, unless `params` says otherwise."""
    settings: dict[str, object] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0, **params}
    return RequestInput(
        request_id=request_id, prompt_ids=list(prompt), output_ids=list(output), params=SamplingParams(**settings)
    )


def make_config(
    *,
    prefix_cache: bool = True,
    overlap: bool = True,
    delay_launch: bool = True,
    checkpoint_interval: int = 16,
    **scheduler: object,
) -> EngineConfig:
    return EngineConfig(
        model="scripted",
        scheduler=SchedulerConfig(**{"max_rows": 8, "token_budget": 64, **scheduler}),
        cache=CacheConfig(prefix_cache=prefix_cache, checkpoint_interval=checkpoint_interval),
        runtime=RuntimeConfig(overlap=overlap, delay_launch=delay_launch),
    )


def continuation(runner: ScriptedRunner, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that follow `prompt`, by the definition of the scripted model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(expected_next(tokens, runner.info.pool, runner.info.vocab_size))
    return tokens[len(prompt) :]


class Harness:
    """An engine that moves when told to. It is its own sink."""

    def __init__(
        self,
        runner: ScriptedRunner,
        config: EngineConfig | None = None,
        drafter: Callable[[], Drafter] | None = None,
        draft_tokens: int = 0,
        grammars: Any = None,
    ) -> None:
        self.runner = runner
        self.engine = Engine(
            runner,
            config or make_config(),
            clock=lambda: self.now,
            sleep=self._sleep,
            drafter=drafter,
            draft_tokens=draft_tokens,
            grammars=grammars,
        )
        self.arriving: list[Callable[[], None]] = []
        self.loop = self.engine.loop
        self.inflight: InFlight | None = None
        self.events: dict[str, list[TokenEvent]] = {}
        self.deliveries: list[list[TokenEvent]] = []

    @property
    def now(self) -> float:
        """Virtual seconds: they pass by steps of the runner, and by hand."""
        return self.runner.now

    @now.setter
    def now(self, now: float) -> None:
        self.runner.now = now

    def _sleep(self, seconds: float) -> None:
        """The loop holds a launch back; who is `arriving` does so meanwhile."""
        self.now += seconds
        while self.arriving:
            self.arriving.pop(0)()

    def deliver(self, events: list[TokenEvent]) -> None:
        self.deliveries.append(events)
        for event in events:
            history = self.events.setdefault(event.request_id, [])
            assert not history or history[-1].finish_reason is None, "an event came after the terminal one"
            history.append(event)

    def submit(self, request_id: str, prompt: Sequence[int], output: Sequence[int] = (), **params: object) -> None:
        self.engine.submit(make_request(request_id, prompt, output, **params), self)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.inflight = self.loop.iterate(self.inflight)
            self.engine.check_integrity()

    def run(self, limit: int = 10_000) -> None:
        """Step until no request is alive and no step in flight."""
        for _ in range(limit):
            if not self.loop.live and self.inflight is None:
                return
            self.step()
        raise AssertionError(f"still alive after {limit} steps: {sorted(self.loop.live)}")

    def tokens(self, request_id: str) -> list[int]:
        return [token for event in self.events.get(request_id, []) for token in event.token_ids]

    def end(self, request_id: str) -> TokenEvent:
        """The terminal event; the request must have ended."""
        event = self.events[request_id][-1]
        assert event.finish_reason is not None
        return event

    def reason(self, request_id: str) -> FinishReason | None:
        return self.end(request_id).finish_reason

    def expected(self, prompt: Sequence[int], count: int = 8) -> list[int]:
        return continuation(self.runner, prompt, count)
