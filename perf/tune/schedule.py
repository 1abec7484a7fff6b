"""Sweeps how many prompt tokens ride with decoding rows, in one process: one model load, many settings.

    python -m perf.tune.schedule CHECKPOINT --mixed 8192
        --prefill-policy 1024:32:1536:4096 --specs c=64:n=256:in=1024:out=128

A policy is min_tokens:tokens_per_row[:wave_aligned_tokens[:backlog_threshold[:backlog_threshold_per_row]]]
(`engine.core.prefill_policy.PrefillPolicy`); `--mixed` fixes the budget instead. Besides the figures of each spec it
tells what its steps were: how many of each kind, their median time from one to the next, their tokens.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from engine.api import Engine
from engine.core.plan import Pending, StepPlan, StepResult
from engine.core.prefill_policy import PrefillPolicy
from engine.serving.host.host import SWITCH_S
from perf.bench.engine import config_from, measure
from perf.provenance import provenance
from perf.workload import parse


@dataclass(frozen=True)
class Seen:
    """A step: entries of one token, longer entries, all tokens, when it was done, and how long its launch took."""

    singles: int
    longer: int
    tokens: int
    done: float
    launch_s: float

    @property
    def kind(self) -> str:
        return "prompts" if not self.singles else "decode" if not self.longer else "mixed"


class Watched:
    """A pending step that notes when it was waited for."""

    def __init__(self, pending: Pending, plan: StepPlan, launch_s: float, log: list[Seen]) -> None:
        self._pending, self._plan, self._launch_s, self._log = pending, plan, launch_s, log

    @property
    def done(self) -> bool:
        return self._pending.done

    def wait(self) -> StepResult:
        result = self._pending.wait()
        count = self._plan.count
        singles = count.count(1)
        seen = Seen(singles, len(count) - singles, sum(count), time.perf_counter(), self._launch_s)
        self._log.append(seen)
        return result


def watch(engine: Engine) -> list[Seen]:
    """Every step of the engine from now on."""
    log: list[Seen] = []
    launch = engine.runner.launch

    def watched(plan: StepPlan) -> Pending:
        began = time.perf_counter()
        pending = launch(plan)
        return Watched(pending, plan, time.perf_counter() - began, log)

    engine.runner.launch = watched  # type: ignore[method-assign]
    return log


def kinds(log: list[Seen]) -> dict[str, dict[str, float]]:
    """Of each kind of step: how many, their median ms, all their seconds, mean tokens and median ms of the launch."""
    found: dict[str, list[tuple[float, Seen]]] = {}
    for before, seen in itertools.pairwise(log):
        found.setdefault(seen.kind, []).append((seen.done - before.done, seen))
    return {
        kind: {
            "steps": len(steps),
            "ms": round(1e3 * statistics.median(spent for spent, _ in steps), 3),
            "all_s": round(sum(spent for spent, _ in steps), 3),
            "tokens": round(statistics.mean(seen.tokens for _, seen in steps), 1),
            "launch_ms": round(1e3 * statistics.median(seen.launch_s for _, seen in steps), 3),
        }
        for kind, steps in sorted(found.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument(
        "--prefill-policy", nargs="*", default=[], metavar="MIN:PER_ROW[:WAVE_ALIGNED[:THRESHOLD[:THRESHOLD_PER_ROW]]]"
    )
    parser.add_argument("--mixed", nargs="*", type=int, default=[], metavar="TOKENS")
    parser.add_argument("--specs", nargs="+", required=True, metavar="SPEC")
    parser.add_argument("--apart", type=float, default=0.0, help="ms between requests that are sent at once")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    parser.add_argument("--json", metavar="FILE", help="append the results to this file")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    began = time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        if done <= 1:
            print(f"{time.perf_counter() - began:7.2f} s {stage}", flush=True)

    engine = Engine.from_config(config_from(args.model, args.set), progress=progress)
    print(f"{time.perf_counter() - began:7.2f} s ready", flush=True)
    pieces = 0
    while engine.runner.idle():
        pieces += 1
    print(f"{time.perf_counter() - began:7.2f} s after {pieces} pieces of work that was put off", flush=True)
    engine.start()
    gc.collect()
    gc.freeze()
    log = watch(engine)
    low, high = min(1000, engine.info.vocab_size // 4), min(100_000, engine.info.vocab_size)
    settings: list[tuple[str, int | None, PrefillPolicy]] = [
        (f"mixed {n}", n, engine.scheduler.prefill_policy) for n in args.mixed
    ]
    settings += [
        (f"prefill policy {text}", None, PrefillPolicy(*map(int, text.split(":")))) for text in args.prefill_policy
    ]
    for seed, text in enumerate(args.specs):
        for turn, (name, mixed, policy) in enumerate(settings):
            engine.scheduler.mixed_budget, engine.scheduler.prefill_policy = mixed, policy
            log.clear()
            # a seed of its own for each: the prefix cache knows no prompt
            figures, _ = measure(engine, parse(text, 1000 + 100 * seed + turn), low, high, args.apart / 1e3)
            steps = kinds(log)
            record: dict[str, Any] = {
                "setting": name,
                "apart_ms": args.apart,
                **figures,
                "steps": steps,
                **provenance(),
            }
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(record) + "\n")
            ttft, tpot, itl = figures["ttft_ms"], figures["tpot_ms"], figures["itl_ms"]
            print(
                f"{text:32} {name:18} {figures['output_tokens_per_s']:8.0f} tok/s  TTFT {ttft['p50']:7.1f} "
                f"{ttft['p99']:7.1f}  TPOT {tpot['p50']:6.2f}  ITL {itl['p50']:6.2f} {itl['p99']:6.1f}  "
                + "  ".join(
                    f"{kind} {of['steps']}x{of['ms']:.2f}({of['tokens']:.0f}t,{of['launch_ms']:.2f})"
                    for kind, of in steps.items()
                ),
                flush=True,
            )
    late = engine.stats().late_compiles
    print(f"{late} kernels were compiled late")
    engine.close()


if __name__ == "__main__":
    main()
