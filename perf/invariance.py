"""What the batch-invariant mode gives and what it costs, on a checkpoint of any size.

    python -m perf.invariance CHECKPOINT --set load_format=dummy [--load c=64:n=64:in=256:out=128]

With runtime.deterministic off and on: tokens a second of a load, and whether probes (greedy, with log-probabilities)
have the same bits alone, beside that load, and behind a warm prefix. With the mode off they should differ, or the
comparison would show nothing; with it on, a difference is an error and the exit status 1.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
from collections.abc import Sequence
from typing import Any

from engine.api import Engine, Generation
from engine.types import RequestInput, SamplingParams
from perf.engine import Client, config_from, measure
from perf.serving import publish
from perf.workload import Spec, parse, requests

LENGTHS = (16, 63, 128, 257, 600, 1030)
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2, ignore_eos=True)

Bits = list[tuple[list[int], list[tuple[list[int], list[float]]]]]


def bits(generations: Sequence[Generation]) -> Bits:
    return [(g.token_ids, [(p.ids, p.logprobs) for p in g.logprobs]) for g in generations]


def probes(name: str, low: int, high: int) -> list[RequestInput]:
    """The same prompts whatever the name."""
    draw = random.Random(5)
    return [
        RequestInput(request_id=f"{name}-{n}", prompt_ids=[draw.randrange(low, high) for _ in range(n)], params=PARAMS)
        for n in LENGTHS
    ]


def compare(engine: Engine, spec: Spec, low: int, high: int) -> dict[str, bool]:
    """Whether each way gives the bits of the probes alone and cold."""
    alone = [engine.generate([probe])[0] for probe in probes("alone", low, high)]
    warm = [engine.generate([probe])[0] for probe in probes("warm", low, high)]
    assert all(g.num_cached for g in warm[1:]), "the prefix cache took nothing"
    together = engine.generate(probes("together", low, high))
    client = Client(engine)
    beside: list[Generation] = []
    thread = threading.Thread(target=lambda: beside.extend(engine.generate(probes("beside", low, high))))
    thread.start()
    client.run(requests(spec, low, high), spec.in_flight)
    thread.join()
    ways = {"behind a warm prefix": warm, "together": together, "beside a load": beside}
    return {way: bits(found) == bits(alone) for way, found in ways.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    parser.add_argument("--load", default="c=64:n=64:in=256:out=128", metavar="SPEC")
    parser.add_argument("--low", type=int, default=1000)
    parser.add_argument("--high", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE", help="append the results to this file")
    args = parser.parse_args()
    spec = parse(args.load, 3)
    speeds: dict[bool, float] = {}
    equal: dict[bool, dict[str, bool]] = {}
    for mode in (False, True):
        settings = [*args.set, f"runtime.deterministic={str(mode).lower()}"]
        engine = Engine.from_config(config_from(args.model, settings)).start()
        try:
            # the first run compiles and captures what the second is measured with
            figures: list[dict[str, Any]] = []
            for _ in range(2):
                found, answers = measure(engine, spec, args.low, args.high)
                figures.append(found)
            equal[mode] = compare(engine, spec, args.low, args.high)
        finally:
            engine.close()
        del engine
        gc.collect()
        label = f"deterministic={str(mode).lower()}"
        publish(
            {"label": label, "via": "in process", "equal": equal[mode], **figures[-1]}, spec, answers, args.json, None
        )
        speeds[mode] = figures[-1]["output_tokens_per_s"]
    print(f"tok/s {speeds[False]:.0f} without, {speeds[True]:.0f} with it: {1 - speeds[True] / speeds[False]:.1%} less")
    for way in equal[True]:
        same = {mode: "equal" if equal[mode][way] else "different" for mode in equal}
        print(f"{way:<24} bits are {same[False]} without, {same[True]} with it")
    return 0 if all(equal[True].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
