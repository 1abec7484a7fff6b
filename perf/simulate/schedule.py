"""How a schedule would do, without a GPU: the engine's own loop over steps that only take time, by measured costs.

    python -m perf.simulate.schedule costs.jsonl c=64:n=256:in=1024:out=128 q=24:n=360:in=1024:out=128
        --prefill-policy 1024:32:1536:4096
    python -m perf.simulate.schedule costs.jsonl SPEC --mixed 512 8192 --set scheduler.max_rows=128 --away 3.3

Costs are of `perf.simulate.step_costs`, on the machine in question; between its points they are interpolated. Specs are
those of `perf.workload`, figures those of a measurement. Time is virtual: it moves by a launch's host time, by
waiting for a step, and to the next arrival when nothing is asked for. What the engine's Python takes is not in it.
`--away` is the time from a last token to the client's next request, half each way, as a server adds it; requests that
come at once are `--apart` ms from each other. `--ranks N --shape LAYERS:HIDDEN:VOCABULARY` plays them on N ranks, whose
steps are a model and were not measured (`perf.simulate.ranks`).
Contexts much unlike those of the costs are not corrected for.
"""

from __future__ import annotations

import argparse
import heapq
import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.api import Engine
from engine.cache.spec import Group, PagedKV, PoolSpec
from engine.config import EngineConfig
from engine.core.commit import InFlight
from engine.core.plan import NO_SHAPES, MixedShapes, RunnerInfo, StepPlan, StepResult
from engine.core.prefill_policy import PrefillPolicy
from engine.types import RequestInput, SamplingParams, TokenEvent
from perf.bench.engine import config_from
from perf.simulate.ranks import SUMS, Ranks, Shape, shared_out
from perf.simulate.step_costs import Cost, read
from perf.workload import Answer, Request, Spec, parse, requests, summary

# From a launch to the device's first work on it, when the device is idle.
LEAD_S = 0.0003
BLOCKS, BLOCK = 1 << 16, 16


class StepTime:
    """Seconds of a step and of its launch by rows that decode and all its tokens, with those it is padded by, linear
    between what was measured. `shapes` are those of the runner that was measured.

    Raises ValueError when the costs are no table: several numbers of prompt tokens for at least two numbers of rows.
    """

    def __init__(self, costs: Iterable[Cost], shapes: MixedShapes = NO_SHAPES) -> None:
        self.shapes = shapes
        lines: dict[int, dict[int, tuple[float, float]]] = {}
        for cost in costs:
            tokens = self._tokens(cost.rows, cost.prompt, cost.chunks)
            lines.setdefault(cost.rows, {})[tokens] = (cost.step_ms / 1e3, cost.launch_ms / 1e3)
        lines.setdefault(0, {})[0] = (0.0, 0.0)
        self._lines = [(rows, sorted(line.items())) for rows, line in sorted(lines.items())]
        if len(self._lines) < 2 or any(len(line) < 2 for _, line in self._lines):
            raise ValueError("costs of at least two numbers of rows and two of prompt tokens are needed")

    def _tokens(self, rows: int, prompt: int, chunks: int) -> int:
        """Tokens beside the rows; 0 without a prompt."""
        return self.shapes.padded(rows, prompt, chunks) - rows if rows and prompt else prompt

    def __call__(self, rows: int, prompt: int, chunks: int) -> tuple[float, float]:
        """(step, launch) in seconds."""
        tokens = self._tokens(rows, prompt, chunks)
        # Numbers of rows that were not measured with so many tokens say nothing of them.
        lines = [(count, line) for count, line in self._lines if line[-1][0] >= tokens]
        if len(lines) < 2:
            lines = self._lines
        at = max(1, min(bisect_right([count for count, _ in lines], rows), len(lines) - 1))
        (few, below), (many, above) = lines[at - 1], lines[at]
        share = (rows - few) / (many - few)
        low, high = _between(below, tokens), _between(above, tokens)
        step, launch = (max(0.0, a + share * (b - a)) for a, b in zip(low, high, strict=True))
        return step, launch


def _between(line: list[tuple[int, tuple[float, float]]], prompt: int) -> tuple[float, float]:
    at = max(1, min(bisect_right([tokens for tokens, _ in line], prompt), len(line) - 1))
    (few, (step, launch)), (many, (more_step, more_launch)) = line[at - 1], line[at]
    share = (prompt - few) / (many - few)
    return step + share * (more_step - step), launch + share * (more_launch - launch)


@dataclass(frozen=True)
class Timed:
    """A step whose end is known. Waiting for it moves the clock there."""

    runner: TimedRunner
    plan: StepPlan
    end: float

    @property
    def done(self) -> bool:
        return self.runner.now >= self.end

    def wait(self) -> StepResult:
        self.runner.now = max(self.runner.now, self.end)
        return StepResult(self.plan.step, [7] * len(self.plan.rows))


class TimedRunner:
    """A runner that computes nothing. `now` is the host's time in seconds; the device works plans off in turn."""

    def __init__(self, time: StepTime) -> None:
        self.now = 0.0
        self.num_late_compiles = 0
        self.steps: list[tuple[int, int, float]] = []
        self._time = time
        self._free_at = 0.0
        group = Group(PagedKV(8, 128, 128, 2), (0,))
        pool = PoolSpec((group,), (BLOCKS,), BLOCK)
        self.info = RunnerInfo(pool, 150_000, BLOCKS * BLOCK // 2, (0,), mixed=time.shapes)

    def launch(self, plan: StepPlan) -> Timed:
        singles = plan.count.count(1)
        prompt = plan.num_tokens - singles
        step, launch = self._time(singles, prompt, len(plan.count) - singles)
        self._free_at = max(self._free_at, self.now + LEAD_S) + step
        self.now += launch
        self.steps.append((singles, prompt, step))
        return Timed(self, plan, max(self._free_at, self.now))

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        return True

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Clients:
    """Those who send a spec's requests and note when tokens come. `due` holds requests that are on their way."""

    def __init__(self, runner: TimedRunner, engine: Engine, spec: Spec, away: float, apart: float) -> None:
        self._runner, self._engine, self._away, self._apart = runner, engine, away, apart
        made = requests(spec, 1000, 100_000)
        self.answers = [Answer(len(request.prompt), request.output, 0.0, 0.0, [], 0) for request in made]
        self.due: list[tuple[float, float, int]] = []
        self._made = made
        self._last = 0.0
        at_once = len(made) if spec.in_flight is None else spec.in_flight
        for i, request in enumerate(made[:at_once]):
            self._send(i, request.at if math.isfinite(request.at) else 0.0)
        self._next = at_once

    def _send(self, index: int, at: float) -> None:
        self._last = max(at + self._away / 2, self._last + self._apart)
        heapq.heappush(self.due, (self._last, at, index))

    def submit(self) -> None:
        """Give the engine what has arrived."""
        while self.due and self.due[0][0] <= self._runner.now:
            _, sent, index = heapq.heappop(self.due)
            self.answers[index].sent = sent
            request: Request = self._made[index]
            params = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True, seed=0)
            self._engine.submit(RequestInput(request_id=str(index), prompt_ids=request.prompt, params=params), self)

    def deliver(self, events: list[TokenEvent]) -> None:
        now = self._runner.now + self._away / 2
        for event in events:
            answer = self.answers[int(event.request_id)]
            if event.token_ids:
                answer.times.append(now)
                answer.tokens += len(event.token_ids)
            if event.finish_reason is not None:
                answer.error, answer.ended = event.error, now
                if self._next < len(self._made):
                    self._send(self._next, now)
                    self._next += 1


def simulate(
    time: StepTime,
    spec: Spec,
    config: EngineConfig,
    chosen: PrefillPolicy | None = None,
    away: float = 0.0,
    apart: float = 0.0,
) -> dict[str, Any]:
    """The figures of a spec, as `perf.workload.summary` gives them, and what its steps were."""
    runner = TimedRunner(time)

    def sleep(seconds: float) -> None:
        runner.now += seconds
        clients.submit()

    engine = Engine(runner, config, clock=lambda: runner.now, sleep=sleep)
    if chosen is not None:
        engine.scheduler.prefill_policy = chosen
    clients = Clients(runner, engine, spec, away, apart)
    loop = engine.loop
    inflight: InFlight | None = None
    while clients.due or loop.live or inflight is not None:
        if inflight is None and not loop.live:
            runner.now = max(runner.now, clients.due[0][0])
        clients.submit()
        inflight = loop.iterate(inflight)
    engine.check_integrity()
    return summary(spec, clients.answers) | {"steps": _kinds(runner.steps)}


def _kinds(steps: Sequence[tuple[int, int, float]]) -> dict[str, dict[str, float]]:
    """Of each kind of step: how many, and their mean of rows, prompt tokens and ms."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    for step in steps:
        found.setdefault("decode" if not step[1] else "mixed" if step[0] else "prompts", []).append(step)
    return {
        kind: {
            "steps": len(of),
            "rows": round(sum(step[0] for step in of) / len(of), 1),
            "prompt": round(sum(step[1] for step in of) / len(of), 1),
            "ms": round(1e3 * sum(step[2] for step in of) / len(of), 2),
        }
        for kind, of in sorted(found.items())
    }


def shapes_of(config: EngineConfig) -> MixedShapes:
    """What an engine of these settings pads mixed steps to on a GPU."""
    from engine.runner.graphs import mixed_shapes

    return (
        mixed_shapes(config.scheduler.max_rows, config.scheduler.token_budget) if config.runtime.graphs else NO_SHAPES
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("costs", type=Path, help="JSON lines of perf.simulate.step_costs, of one model on one machine")
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument(
        "--prefill-policy", nargs="*", default=[], metavar="MIN:PER_ROW[:WAVE_ALIGNED[:THRESHOLD[:THRESHOLD_PER_ROW]]]"
    )
    parser.add_argument("--mixed", nargs="*", type=int, default=[], metavar="TOKENS")
    parser.add_argument("--away", type=float, default=0.0, help="ms from a last token to the next request")
    parser.add_argument("--apart", type=float, default=0.0, help="ms between requests sent at once")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share a step out; needs --shape")
    parser.add_argument("--shape", type=Shape.parse, metavar="LAYERS:HIDDEN:VOCABULARY", help="for --ranks")
    parser.add_argument("--sums", nargs="+", choices=sorted(SUMS), default=["nccl"], help="of ranks")
    parser.add_argument("--whole", type=float, default=0.0, help="ms of a step that every rank does whole")
    args = parser.parse_args(arguments)
    if (args.ranks > 1) != (args.shape is not None):
        parser.error("--ranks and --shape go together: what crosses ranks goes by the model's shape")
    costs, shapes = read(args.costs), shapes_of(config_from("simulated", args.set))
    if args.shape is not None:
        costs = shared_out(costs, Ranks(args.shape, args.ranks, tuple(args.sums), args.whole), shapes)
        print(f"{args.ranks} ranks: a model, not a measurement")
    time = StepTime(costs, shapes)
    settings: list[tuple[str, list[str], PrefillPolicy | None]] = [
        (f"mixed {n}", [f"scheduler.mixed_budget={n}"], None) for n in args.mixed
    ]
    settings += [
        (f"prefill policy {text}", [], PrefillPolicy(*map(int, text.split(":")))) for text in args.prefill_policy
    ]
    for text in args.specs:
        for name, more, chosen in settings or [("as set", [], None)]:
            config = config_from("simulated", [*args.set, *more])
            figures = simulate(time, parse(text, 1), config, chosen, args.away / 1e3, args.apart / 1e3)
            print(line(text, name, figures), flush=True)


def line(text: str, name: str, figures: dict[str, Any]) -> str:
    """One line of a simulation, for reading along."""
    ttft, tpot, itl = figures["ttft_ms"], figures["tpot_ms"], figures["itl_ms"]
    kinds = "  ".join(
        f"{kind} {of['steps']}x{of['ms']}({of['rows']}r,{of['prompt']}t)" for kind, of in figures["steps"].items()
    )
    return (
        f"{text:32} {name:18} {figures['output_tokens_per_s']:7.0f} tok/s  TTFT {ttft['p50']:7.1f} {ttft['p99']:7.1f}  "
        f"TPOT {tpot['p50']:6.2f}  ITL {itl['p50']:6.2f} {itl['p99']:6.1f}  {kinds}"
    )


if __name__ == "__main__":
    main()
