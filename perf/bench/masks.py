"""What constrained rows cost the host a step, without a model: following their tokens, and their masks.

    python -m perf.bench.masks [--tokenizer FOLDER] [--rows 1,8,64] [--steps 100] [--forward-ms 5]

Each row keeps to a schema of its own and goes on with any token that it allows. Without a tokenizer's folder one is
made up, of 151,936 tokens (`perf.shapes`). Two tables, of the same rows:

parts: µs of the loop's thread in one step, of matchers that go one by one (`advance`, `masks` on this thread, and
`send` of new arrays) and of those that go together as the engine has it (`advance`, `start`, `wait` behind
--commit-us of other work of that thread, and `send`). On a GPU `send` is what it takes to put masks on their way.

steps: µs of a step of the engine's loop over a device that does nothing for --forward-ms a step, free and constrained;
of it what the loop's thread took of a processor (`thread`, which other processes change little), and how long its parts
were. The ratio of such steps has to stay below 1.03.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from engine.api import Engine
from engine.config import EngineConfig, SchedulerConfig
from engine.core.commit import InFlight
from engine.core.plan import StepPlan, StepResult
from engine.runner.mask_staging import MaskStaging
from engine.sampling.logits import sent
from engine.structured.grammars import Grammars
from engine.structured.matcher import GrammarMatcher
from engine.structured.vocabulary import Vocabulary
from engine.text import Tokenizer
from engine.types import Constraint, RequestInput, SamplingParams
from perf import shapes
from perf.bench.host import Nowhere, NullRunner
from perf.workload import schema

DRAW_S = 0.0002  # what a device takes to draw

Masks = npt.NDArray[np.int32]
Times = dict[str, list[float]]


def drawn(masks: Masks, draw: np.random.Generator) -> list[int]:
    """A token that each mask [n, W] allows: of the first word with any, behind a word by chance."""
    start = int(draw.integers(masks.shape[1]))
    behind = masks[:, start:] != 0
    words = np.where(behind.any(axis=1), start + behind.argmax(axis=1), (masks != 0).argmax(axis=1))
    chosen = masks[np.arange(len(masks)), words].view(np.uint32).tolist()
    return [32 * int(word) + (bits & -bits).bit_length() - 1 for word, bits in zip(words, chosen, strict=True)]


def timed(into: list[float], what: Callable[..., Any], *arguments: Any) -> Any:
    """What it gives; its µs are put down."""
    began = time.perf_counter()
    result = what(*arguments)
    into.append((time.perf_counter() - began) * 1e6)
    return result


def compiled(vocabulary: Vocabulary, rows: int) -> list[GrammarMatcher]:
    constraints = [Constraint(kind="json", text=json.dumps(schema(number))) for number in range(rows)]
    return [vocabulary.begun(vocabulary.compiled(of), 10**6, ()) for of in constraints]


def busy(seconds: float) -> None:
    """Python that holds the interpreter's lock."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def parts(vocabulary: Vocabulary, rows: int, steps: int, commit_s: float, device: torch.device) -> tuple[Times, Times]:
    """µs of each part of each step, of matchers one by one and together. They share no states."""
    draw = np.random.default_rng(0)
    singly, jointly = compiled(vocabulary, rows), compiled(vocabulary, rows)
    staging = MaskStaging(device)
    alone: Times = {name: [] for name in ("advance", "masks", "send")}
    together: Times = {name: [] for name in ("advance", "start", "wait", "send")}

    def advance_each(tokens: list[int]) -> None:
        for matcher, token in zip(singly, tokens, strict=True):
            matcher.advance(token)

    def start() -> tuple[Masks, Any]:
        masks = staging.rows(rows, vocabulary.mask_words)
        return masks, vocabulary.start_masks(jointly, (), masks)

    def send(masks: Masks) -> None:
        sent(np.arange(rows, dtype=np.int32), device)
        sent(masks, device)

    tokens: list[int] = []
    for _ in range(steps):
        if tokens:
            timed(alone["advance"], advance_each, tokens)
            timed(together["advance"], vocabulary.advance, jointly, [[token] for token in tokens])
        masks = timed(alone["masks"], vocabulary.masks, singly)
        timed(alone["send"], send, masks)
        written, made = timed(together["start"], start)
        busy(commit_s)
        timed(together["wait"], made.result)
        timed(together["send"], staging.send, range(rows))
        if not np.array_equal(masks, written):
            raise RuntimeError("matchers together allow other tokens than one by one")
        tokens = drawn(masks, draw)
    broken = [matcher.error for matcher in (*singly, *jointly) if matcher.error is not None]
    if broken:
        raise RuntimeError(broken[0])
    return alone, together


class PacedStep:
    """A launched step of a device that takes `forward_s` for it, and draws any token that masks allow."""

    def __init__(self, runner: PacedRunner, plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan
        self._masks: Masks | None = None
        self._tokens = [7] * len(plan.rows)
        self._computed = max(time.perf_counter(), runner.free_at) + runner.forward_s
        self._drawn = runner.free_at = self._computed + DRAW_S
        if plan.masked:
            self._drawn = float("inf")

    @property
    def done(self) -> bool:
        return time.perf_counter() >= self._drawn

    def mask_rows(self, count: int, words: int) -> Masks:
        self._masks = self._runner.staging.rows(count, words)
        return self._masks

    def draw(self) -> None:
        assert self._masks is not None
        called = time.perf_counter()
        self._runner.staging.send(range(len(self._masks)))
        self._drawn = self._runner.free_at = max(called, self._computed) + DRAW_S
        began = time.thread_time()
        for entry, token in zip(self._plan.masked, drawn(self._masks, self._runner.chance), strict=True):
            self._tokens[entry] = token
        self._runner.drawing_s += time.thread_time() - began

    def wait(self) -> StepResult:
        while (left := self._drawn - time.perf_counter()) > 0:
            time.sleep(left)
        return StepResult(self._plan.step, self._tokens)


class PacedRunner(NullRunner):
    """free_at: when the device has nothing left to do. drawing_s: what the loop's thread did in its place."""

    def __init__(self, vocab_size: int, tokens: int, rows: int, forward_s: float) -> None:
        super().__init__(rows * (tokens // 16 + 2) + 1, tokens, vocab_size, vocab_size - 1)
        self.forward_s = forward_s
        self.free_at = 0.0
        self.drawing_s = 0.0
        self.staging = MaskStaging(torch.device("cpu"))
        self.chance = np.random.default_rng(0)

    def launch(self, plan: StepPlan) -> PacedStep:
        return PacedStep(self, plan)


class TimedGrammars(Grammars):
    """times: µs of the loop's thread in what it asks, once it is set."""

    times: Times | None = None

    def advance(self, *arguments: Any) -> list[int]:
        into = [] if self.times is None else self.times["advance"]
        return cast("list[int]", timed(into, super().advance, *arguments))

    def start_masks(self, *arguments: Any) -> Future[None]:
        times = self.times or {"start": [], "wait": []}
        return cast("Future[None]", TimedWait(timed(times["start"], super().start_masks, *arguments), times["wait"]))


class TimedWait:
    def __init__(self, made: Future[None], into: list[float]) -> None:
        self.done = made.done
        self._made = made
        self._into = into

    def result(self) -> None:
        timed(self._into, self._made.result)


def steps_of(folder: str, vocab_size: int, rows: int, steps: int, forward_s: float, held: bool) -> Times:
    """µs of each step of the loop, and of parts of it, with `rows` requests that decode."""
    runner = PacedRunner(vocab_size, steps + 128, rows, forward_s)
    config = EngineConfig(model="paced", scheduler=SchedulerConfig(max_rows=rows, token_budget=8192))
    grammars = TimedGrammars(folder, vocab_size, runner.info.eos_ids)
    engine = Engine(runner, config, grammars=grammars)
    for number in range(rows):
        constraint = Constraint(kind="json", text=json.dumps(schema(number))) if held else None
        params = SamplingParams(max_tokens=steps + 64, ignore_eos=True, seed=0, structured_outputs=constraint)
        engine.submit(RequestInput(request_id=str(number), prompt_ids=[1] * 16, params=params), Nowhere())
    loop, inflight = engine.loop, None
    while not loop.scheduler.has_work:
        loop._drain()
        time.sleep(0.01)
    while engine.stats().waiting or len(inflight.plan.rows if inflight else ()) < rows:
        inflight = loop.iterate(inflight)
    times: Times = {name: [] for name in ("step", "thread", "advance", "start", "wait", "commit")}
    commit = loop.committer.commit
    loop.committer.commit = lambda *arguments: timed(times["commit"], commit, *arguments)  # type: ignore[method-assign]
    grammars.times = times
    for _ in range(steps):
        began = time.thread_time() - runner.drawing_s
        inflight = timed(times["step"], loop.iterate, inflight)
        times["thread"].append((time.thread_time() - runner.drawing_s - began) * 1e6)
    _finish(engine, inflight)
    return times


def _finish(engine: Engine, inflight: InFlight | None) -> None:
    if inflight is not None:
        inflight.pending.wait()
    engine.close()


def told(times: Times) -> str:
    """Medians, µs."""
    return ", ".join(f"{name} {statistics.median(of):6.0f}" for name, of in times.items() if of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", help="folder of a checkpoint's tokenizer")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--forward-ms", type=float, default=5.0)
    parser.add_argument("--commit-us", type=float, default=300.0)
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as made_up:
        folder = arguments.tokenizer or str(shapes.write(Path(made_up), "qwen3-8b"))
        size = Tokenizer.from_folder(folder).vocab_size
        vocabulary = Vocabulary(folder, size, (size - 1,))
        counts = list(map(int, arguments.rows.split(",")))
        for rows in counts:
            alone, together = parts(vocabulary, rows, arguments.steps, arguments.commit_us / 1e6, device)
            print(f"{rows:4d} rows, µs one by one: {told(alone)}\n           µs together:   {told(together)}")
        for rows in counts:
            of = (folder, size, rows, arguments.steps, arguments.forward_ms / 1e3)
            free, held = steps_of(*of, False), steps_of(*of, True)
            ratio = statistics.mean(held["step"]) / statistics.mean(free["step"])
            print(f"{rows:4d} rows, µs free: {told(free)}\n       constrained: {told(held)}; {ratio:.3f} of free")


if __name__ == "__main__":
    main()
