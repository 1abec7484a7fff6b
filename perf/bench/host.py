"""What a step costs on the host, without a model: scheduling, committing, delivering, at several numbers of rows.

    python -m perf.bench.host [--rows 1,64,256,512] [--steps 400] [--prompt 512]

The runner here computes nothing, so all the time is the engine's own. Also: the cost of admitting one long prompt, and
the way of its first token from the runner to whoever asked.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

from engine.api import Engine
from engine.cache.spec import Group, PagedKV, PoolSpec
from engine.config import EngineConfig, RuntimeConfig, SchedulerConfig
from engine.core.commit import InFlight
from engine.core.plan import Pending, RunnerInfo, StepPlan, StepResult
from engine.types import RequestInput, SamplingParams, TokenEvent


class Done:
    """A step whose result is there: one token, always the same."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan = plan
        self.at = 0.0

    @property
    def done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        self.at = time.perf_counter()
        return StepResult(self._plan.step, [7] * len(self._plan.rows))


class NullRunner:
    def __init__(self, num_blocks: int, max_model_len: int, vocab_size: int = 150_000, eos_id: int = 0) -> None:
        group = Group(PagedKV(8, 128, 128, 2), (0,))
        self.num_late_compiles = 0
        self.info = RunnerInfo(PoolSpec((group,), (num_blocks,), 16), vocab_size, max_model_len, (eos_id,))

    def launch(self, plan: StepPlan) -> Pending:
        return Done(plan)

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        return True

    def idle(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Nowhere:
    """at: when the first event came."""

    def __init__(self) -> None:
        self.at: float | None = None

    def deliver(self, events: list[TokenEvent]) -> None:
        self.at = self.at or time.perf_counter()


class Timed:
    """Runs a function and keeps how long each call took, in µs."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self.times: list[float] = []

    def __call__(self, *args: object) -> object:
        start = time.perf_counter()
        result = self._function(*args)
        self.times.append((time.perf_counter() - start) * 1e6)
        return result


def build(rows: int, tokens: int, budget: int = 8192) -> Engine:
    config = EngineConfig(
        model="null",
        scheduler=SchedulerConfig(max_rows=rows, token_budget=max(budget, rows)),
        runtime=RuntimeConfig(overlap=True),
    )
    return Engine(NullRunner(rows * (tokens // 16 + 2) + 1, tokens), config)


def submit(engine: Engine, name: str, prompt: list[int], max_tokens: int) -> Nowhere:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=0)
    sink = Nowhere()
    engine.submit(RequestInput(request_id=name, prompt_ids=prompt, params=params), sink)
    return sink


def steady(rows: int, steps: int, prompt: int) -> dict[str, float]:
    """Median µs of each part of a step in which `rows` requests decode."""
    engine = build(rows, prompt + steps + 64)
    for i in range(rows):
        submit(engine, str(i), [1 + (i * 7919 + j) % 100_000 for j in range(prompt + i % 16)], steps + 32)
    loop = engine.loop
    inflight: InFlight | None = None
    while engine.stats().waiting or len(inflight.plan.rows if inflight else ()) < rows:
        inflight = loop.iterate(inflight)
    for _ in range(3):
        inflight = loop.iterate(inflight)
    parts = {
        "schedule": Timed(loop.scheduler.schedule),
        "commit": Timed(loop.committer.commit),
        "deliver": Timed(loop.deliver),
        "insert_prefix_blocks": Timed(loop.committer.insert_prefix_blocks),
        "step": Timed(loop.iterate),
    }
    loop.scheduler.schedule = parts["schedule"]  # type: ignore[method-assign, assignment]
    loop.committer.commit = parts["commit"]  # type: ignore[method-assign, assignment]
    loop.deliver = parts["deliver"]  # type: ignore[method-assign, assignment]
    loop.committer.insert_prefix_blocks = parts["insert_prefix_blocks"]  # type: ignore[method-assign, assignment]
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        inflight = parts["step"](inflight)  # type: ignore[assignment]
    return {name: statistics.median(part.times) for name, part in parts.items()}


def admission(length: int) -> dict[str, float]:
    """Least µs, of five, of the step that admits a prompt of `length` tokens: into an empty pool, with its blocks in
    the prefix tree, and into a pool full of others' blocks; and of a first token's way from the runner to its sink."""
    least = dict.fromkeys(("cold", "cached", "full", "token"), float("inf"))
    for _ in range(5):
        engine = build(4, 2 * length, budget=length)  # a pool for eight such prompts
        for i, way in enumerate(("cold", "cached", *["filling"] * 8, "full")):
            first = 0 if way == "cached" else i
            sink = submit(engine, str(i), [1 + (first + j) % 100_000 for j in range(length)], 2)
            start = time.perf_counter()
            inflight = engine.loop.iterate(None)
            took = {way: time.perf_counter() - start}
            assert inflight is not None
            done = inflight.pending
            assert isinstance(done, Done)
            while inflight is not None:
                inflight = engine.loop.iterate(inflight)
            assert sink.at is not None
            took["token"] = sink.at - done.at
            least.update({name: min(least[name], took[name] * 1e6) for name in least.keys() & took.keys()})
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,64,256,512")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt", type=int, default=512)
    arguments = parser.parse_args()
    parts = ("schedule", "commit", "deliver", "insert_prefix_blocks", "step")
    heads = " ".join(f"{name:>9}" for name in (*parts, "a row"))
    print(f"{'rows':>5} {heads}   µs, median")
    for rows in map(int, arguments.rows.split(",")):
        cost = steady(rows, arguments.steps, arguments.prompt)
        columns = " ".join(f"{cost[name]:9.1f}" for name in parts)
        print(f"{rows:>5} {columns} {cost['step'] / rows:9.2f}")
    for length in (1024, 16384):
        cost = admission(length)
        print(
            f"admitting {length} tokens: {cost['cold']:.0f} µs, {cost['cached']:.0f} with every block in the tree, "
            f"{cost['full']:.0f} into a full pool; {cost['token']:.0f} from the first token's result to its event"
        )


if __name__ == "__main__":
    main()
