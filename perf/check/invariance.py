"""What the batch-invariant mode gives and what it costs, on a checkpoint of any size.

    python -m perf.check.invariance CHECKPOINT --set load_format=dummy [--load c=64:n=64:in=256:out=128 ...] [--only-on]

With runtime.deterministic off and on: tokens a second of each load, and whether probes (greedy, with log-probabilities)
have the same bits alone, together, behind a warm prefix and beside each load, and the loads' own tokens are the same
when they run again. With the mode off something should differ, or the comparison would show nothing; with it on, a
difference is an error and the exit status 1.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import threading
from collections.abc import Sequence

from engine.api import Engine, Generation
from engine.types import RequestInput, SamplingParams
from perf.bench.engine import Client, config_from, measure
from perf.bench.serving import publish
from perf.workload import Spec, parse, requests

LOADS = ("c=64:n=64:in=256:out=128", "c=256:n=512:in=32-700:out=16-96")
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


def beside(engine: Engine, spec: Spec, low: int, high: int) -> tuple[list[Bits], list[tuple[int, ...]]]:
    """Bits of the probes, again and again until the load has run, and the load's own tokens."""
    found: list[Bits] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            found.append(bits(engine.generate(probes(f"beside-{len(found)}", low, high))))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        answers = Client(engine).run(requests(spec, low, high), spec.in_flight)
    finally:
        over.set()
        thread.join()
    return found, [answer.ids for answer in answers]


def compare(engine: Engine, specs: Sequence[Spec], low: int, high: int) -> dict[str, bool]:
    """Whether each way gives the bits of the probes alone and cold, and each load its own tokens again."""
    alone = bits([engine.generate([probe])[0] for probe in probes("alone", low, high)])
    warm = [engine.generate([probe])[0] for probe in probes("warm", low, high)]
    assert all(g.num_cached for g in warm[1:]), "the prefix cache took nothing"
    together = bits(engine.generate(probes("together", low, high)))
    ways = {"behind a warm prefix": bits(warm) == alone, "together": together == alone}
    for spec in specs:
        found, first = beside(engine, spec, low, high)
        more, again = beside(engine, spec, low, high)
        assert found, f"no probe ran beside {spec.text}"
        assert more, f"no probe ran beside {spec.text}"
        ways[f"beside {spec.text}"] = all(one == alone for one in (*found, *more))
        ways[f"{spec.text} again"] = first == again
    return ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    parser.add_argument("--load", nargs="+", default=LOADS, metavar="SPEC", help=f"default: {' '.join(LOADS)}")
    parser.add_argument("--only-on", action="store_true", help="leave out the engine with the mode off")
    parser.add_argument("--low", type=int, default=1000)
    parser.add_argument("--high", type=int, default=100_000)
    parser.add_argument("--json", metavar="FILE", help="append the results to this file")
    args = parser.parse_args()
    specs = [parse(text, 3) for text in args.load]
    modes = (True,) if args.only_on else (False, True)
    speeds: dict[bool, list[float]] = {}
    equal: dict[bool, dict[str, bool]] = {}
    for mode in modes:
        settings = [*args.set, f"runtime.deterministic={str(mode).lower()}"]
        engine = Engine.from_config(config_from(args.model, settings)).start()
        try:
            # the first run of each compiles and captures what the second is measured with
            figures = [[measure(engine, spec, args.low, args.high) for _ in range(2)][-1] for spec in specs]
            equal[mode] = compare(engine, specs, args.low, args.high)
        finally:
            engine.close()
        del engine
        gc.collect()
        label = f"deterministic={str(mode).lower()}"
        for spec, (found, answers) in zip(specs, figures, strict=True):
            publish(
                {"label": label, "via": "in process", "equal": equal[mode], **found}, spec, answers, args.json, None
            )
        speeds[mode] = [found["output_tokens_per_s"] for found, _ in figures]
    for i, spec in enumerate(specs):
        cost = (
            ""
            if args.only_on
            else f", {speeds[False][i]:.0f} without: {1 - speeds[True][i] / speeds[False][i]:.1%} less"
        )
        print(f"{spec.text:<40} {speeds[True][i]:.0f} tok/s with it{cost}")
    for way in equal[True]:
        same = ", ".join(
            f"{'equal' if equal[mode][way] else 'different'} {'with' if mode else 'without'} it" for mode in modes
        )
        print(f"{way:<40} bits are {same}")
    return 0 if all(equal[True].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
