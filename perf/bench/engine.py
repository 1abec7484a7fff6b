"""The engine alone, in this process: the same specs as `perf.bench.serving`, without a server in between.

    python -m perf.bench.engine CHECKPOINT [--set load_format=dummy --set scheduler.max_rows=256] SPEC [SPEC …]

What a server adds is the difference to `perf.bench.serving` with the same spec and seed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from engine.api import Engine
from engine.config import EngineConfig
from engine.serving.host.host import SWITCH_S
from engine.types import RequestInput, SamplingParams, TokenEvent
from perf.bench.serving import publish
from perf.workload import Answer, Request, Spec, parse, requests, summary, warm_requests


def config_from(model: str, settings: Sequence[str]) -> EngineConfig:
    """An EngineConfig from KEY=VALUE settings with dotted keys; values are JSON where they parse, else text."""
    tree: dict[str, Any] = {"model": model}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        node = tree
        *path, last = key.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return msgspec.convert(tree, EngineConfig)


class Client:
    """Sends requests as a spec says and notes when their tokens came. It is the engine's sink. Requests are at least
    `apart` seconds from each other, as those that come through a server."""

    def __init__(self, engine: Engine, apart: float = 0.0) -> None:
        self._engine = engine
        self._apart = apart
        self._answers: dict[str, Answer] = {}
        self._ids: dict[str, list[int]] = {}
        self._done = threading.Semaphore(0)
        self._count = 0

    def deliver(self, events: list[TokenEvent]) -> None:
        now = time.perf_counter()
        for event in events:
            answer = self._answers[event.request_id]
            if event.token_ids:
                answer.times.append(now)
                answer.tokens += len(event.token_ids)
                self._ids[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                answer.error, answer.ended = event.error, now
                self._done.release()

    def _send(self, request: Request) -> str:
        self._count += 1
        name = str(self._count)
        params = SamplingParams(max_tokens=request.output, temperature=0.0, ignore_eos=True)
        self._ids[name] = []
        self._answers[name] = Answer(len(request.prompt), request.output, time.perf_counter(), 0.0, [], 0)
        self._engine.submit(RequestInput(request_id=name, prompt_ids=request.prompt, params=params), self)
        return name

    def run(self, made: list[Request], in_flight: int | None) -> list[Answer]:
        names = []
        running = 0
        start = time.perf_counter()
        for request in made:
            wait = start + request.at - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            if in_flight is not None and running == in_flight:
                self._done.acquire()
                running -= 1
            if self._apart:
                time.sleep(self._apart)
            names.append(self._send(request))
            running += 1
        for _ in range(running):
            self._done.acquire()
        answers = []
        for name in names:
            answer = self._answers.pop(name)
            answer.ids = tuple(self._ids.pop(name))
            answers.append(answer)
        return answers


def measure(engine: Engine, spec: Spec, low: int, high: int, apart: float = 0.0) -> tuple[dict[str, Any], list[Answer]]:
    """Runs one spec and sums it up."""
    client = Client(engine, apart)
    client.run(warm_requests(spec, low, high), None)
    before = time.process_time()
    answers = client.run(requests(spec, low, high), spec.in_flight)
    return summary(spec, answers) | {"cpu_s": round(time.process_time() - before, 2)}, answers


def choose_alike(engine: Engine) -> None:
    """Let every token choose the same experts, by routers of zeros: what a peer measures whose routing ties."""
    from engine.layers.moe import Moe
    from engine.runner.runner import DeviceRunner

    runner = engine.runner
    assert isinstance(runner, DeviceRunner)
    for layer in runner.decoder.layers:
        if isinstance(layer.ffn, Moe):
            layer.ffn.router.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    parser.add_argument("--label", default="")
    parser.add_argument("--low", type=int, default=1000)
    parser.add_argument("--high", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="append the results to this file")
    parser.add_argument("--ids", metavar="FILE", help="write every answer's token ids to this file")
    parser.add_argument("--same-experts", action="store_true", help="all tokens choose the same experts")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds to wait before the first spec")
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    began = time.perf_counter()
    engine = Engine.from_config(config_from(args.model, args.set)).start()
    print(f"engine ready after {time.perf_counter() - began:.1f} s", file=sys.stderr)
    if args.same_experts:
        choose_alike(engine)
    time.sleep(args.settle)
    gc.collect()
    gc.freeze()
    failed = 0
    for i, text in enumerate(args.specs):
        spec = parse(text, args.seed + i)
        figures, answers = measure(engine, spec, args.low, args.high)
        publish(
            {"label": args.label, "via": "in process", "same_experts": args.same_experts, **figures},
            spec,
            answers,
            args.json,
            args.ids,
        )
        failed += figures["failed"]
    engine.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
