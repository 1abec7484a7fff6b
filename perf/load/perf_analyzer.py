"""NVIDIA's perf_analyzer against a running server, with the figures that it leaves out: TTFT, ITL, tokens/s.

    python -m perf.load.perf_analyzer [--url localhost:8001] [--model demo] [--concurrency 4] [--requests 20] \\
        [--json OUT]

Runs the command that Triton's own tests run for streamed language models (server/qa/L0_perf_vllm), for a fixed number
of requests, with the binary out of the tritonclient 2.50.0 wheel, then reads its profile export. The two libraries
that the binary wants from the system are lent to it from the nvidia-pytriton wheel, so nothing has to be installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from clients.python.perf_analyzer import NoPerfAnalyzer, binary, lend_libraries, with_libraries
from clients.python.timing import percentile

# About one run in fifteen of the 2.50.0 binary succeeds, says so, and leaves an export that lacks its last buffer of
# 64 KB: it is empty then, or ends in the middle.
_ATTEMPTS = 4


class PerfAnalyzerError(Exception):
    """perf_analyzer could not run or failed requests; the message says which."""


class Profile(msgspec.Struct, frozen=True):
    """What one run measured; times in seconds, one entry a request (ttft, latency) or a token after the first (itl)."""

    concurrency: int
    num_requests: int
    num_tokens: int
    seconds: float
    ttft: list[float]
    itl: list[float]
    latency: list[float]


def run(
    url: str,
    model: str,
    *,
    concurrency: int,
    requests: int,
    prompt: str,
    max_tokens: int,
    extra: Sequence[str] = (),
) -> Profile:
    """Measure; every request is streamed and `max_tokens` long. Raises PerfAnalyzerError."""
    with tempfile.TemporaryDirectory(prefix="nereid-perf-") as name:
        folder = Path(name)
        try:
            program = binary()
        except NoPerfAnalyzer as error:
            raise PerfAnalyzerError(str(error)) from None
        lend_libraries(folder)
        (folder / "input.json").write_text(json.dumps(input_data(prompt, max_tokens)))
        command = [
            program, "-m", model, "-u", url, "-i", "grpc", "--async", "--streaming",
            f"--concurrency-range={concurrency}", f"--request-count={requests}",
            f"--input-data={folder / 'input.json'}", f"--profile-export-file={folder / 'export.json'}", *extra,
        ]  # fmt: skip
        libraries = with_libraries(folder)
        for _ in range(_ATTEMPTS):
            done = subprocess.run(
                command, env={**os.environ, "LD_LIBRARY_PATH": libraries}, capture_output=True, text=True
            )
            if done.returncode != 0 or not (folder / "export.json").is_file():
                # what is wrong stands before the usage, which is long
                said = f"{done.stdout[:1500]}\n{done.stderr[:1500]}"
                raise PerfAnalyzerError(f"perf_analyzer ended with status {done.returncode}:\n{said}")
            try:
                export = json.loads((folder / "export.json").read_text())
            except ValueError as error:
                (folder / "export.json").unlink()  # perf_analyzer does not start where one stands
                failure = f"perf_analyzer's export is not JSON ({error}):\n{done.stdout[-3000:]}"
            else:
                return read_export(export, max_tokens)
        raise PerfAnalyzerError(failure)


def input_data(prompt: str, max_tokens: int) -> dict[str, Any]:
    """One request with vllm_backend's tensors. ignore_eos makes every answer as long as the others."""
    parameters = json.dumps({"max_tokens": max_tokens, "min_tokens": max_tokens, "ignore_eos": True, "temperature": 0})
    request = {
        "text_input": [prompt],
        "stream": [True],
        "return_num_output_tokens": [True],
        "sampling_parameters": [parameters],
    }
    return {"data": [request]}


def read_export(export: Mapping[str, Any], max_tokens: int) -> Profile:
    """The figures in a profile export. Raises PerfAnalyzerError when a request lacks tokens.

    A response without outputs is the empty one that only says that a stream is over; it is no token.
    """
    experiment = export["experiments"][0]
    ttft, itl, latency = [], [], []
    first, last = float("inf"), 0.0
    for request in experiment["requests"]:
        start = request["timestamp"] / 1e9
        times = _token_times(request)
        if len(times) != max_tokens:
            raise PerfAnalyzerError(f"a request was answered with {len(times)} tokens instead of {max_tokens}")
        ttft.append(times[0] - start)
        latency.append(times[-1] - start)
        itl += [after - before for before, after in itertools.pairwise(times)]
        first, last = min(first, start), max(last, times[-1])
    if not ttft:
        raise PerfAnalyzerError("perf_analyzer completed no request")
    return Profile(
        concurrency=experiment["experiment"]["value"],
        num_requests=len(ttft),
        num_tokens=len(ttft) * max_tokens,
        seconds=last - first,
        ttft=ttft,
        itl=itl,
        latency=latency,
    )


def _token_times(request: Mapping[str, Any]) -> list[float]:
    times: list[float] = []
    for at, outputs in zip(request["response_timestamps"], request["response_outputs"], strict=True):
        times += [at / 1e9] * int(outputs.get("num_output_tokens", 0))
    return times


def table(profiles: Sequence[Profile]) -> Table:
    heads = ("streams", "requests", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "latency p50", "tokens/s")
    out = Table(*heads, box=SIMPLE, padding=0, show_edge=False, title="perf_analyzer", caption="times in ms")
    for profile in profiles:
        spans = (profile.ttft, 50), (profile.ttft, 99), (profile.itl, 50), (profile.itl, 99)
        times = [f"{percentile(v, p) * 1e3:.1f}" if v else "-" for v, p in (*spans, (profile.latency, 50))]
        rate = f"{profile.num_tokens / profile.seconds:.0f}"
        out.add_row(str(profile.concurrency), str(profile.num_requests), *times, rate)
    return out


def plot(profiles: Sequence[Profile], png: Path) -> None:
    """Tokens a second, and times at the median and the 99th percentile, over the number of streams."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    streams = [profile.concurrency for profile in profiles]
    left.plot(streams, [profile.num_tokens / profile.seconds for profile in profiles], marker="o")
    left.set_ylabel("tokens/s")
    for name, values in (("TTFT", [p.ttft for p in profiles]), ("ITL", [p.itl for p in profiles])):
        for p, style in ((50, "-"), (99, "--")):
            times = [percentile(one, p) * 1e3 for one in values]
            right.plot(streams, times, style, marker="o", label=f"{name} p{p}")
    right.set_ylabel("ms")
    right.set_yscale("log")
    right.legend()
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(streams, [str(count) for count in streams])
        axes.set_xlabel("streams")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(png, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt", default="A server takes a question and gives back an answer. " * 4)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write every time to this file")
    parser.add_argument("--png", type=Path, help="also draw tokens/s, TTFT and ITL over the streams into this file")
    args, extra = parser.parse_known_args()
    console = Console()
    try:
        profiles = [
            run(
                args.url,
                args.model,
                concurrency=concurrency,
                requests=args.requests,
                prompt=args.prompt,
                max_tokens=args.max_tokens,
                extra=extra,
            )
            for concurrency in args.concurrency
        ]
    except PerfAnalyzerError as error:
        console.print(f"error: {error}", markup=False)
        return 1
    console.print(table(profiles))
    if args.json is not None:
        args.json.write_bytes(msgspec.json.encode(profiles))
    if args.png is not None:
        plot(profiles, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
