"""Starts a server, measures the rows of the published table on it, and stops it: ours, or vLLM with the same client.

    python -m perf.suite nereid FOLDER_OF_MODELS qwen3-4b --json results.jsonl [--rows 1x128 8x1024] [--set KEY=VALUE]
    python -m perf.suite vllm   FOLDER_OF_MODELS qwen3-4b --json results.jsonl --env "source SITE/_vb/env.sh"

Where `gpu_box.sh` was sourced, the peer finds the numpy that was there before by another line in --env:
`export PYTHONPATH=/tmp/nereid-site/peer:$PYTHONPATH`.

`--repeat N` runs each row that takes less than `--longest` seconds N times, with prompts of its own each time (the same
for every server), and writes medians with their range.

Besides the rows: seconds from the start command to the first accepted request, with compile caches as they are, and
resident memory of all processes of the server after the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from engine.models import registry
from engine.text.tokenizer import Tokenizer
from perf.bench.repeats import combined
from perf.bench.serving import GrpcTransport, OpenAiTransport, Transport, measure
from perf.provenance import provenance
from perf.workload import parse

# name of the row -> spec. Seeds are fixed, so that every server gets the same prompts.
ROWS = {
    "1x128/256": "c=1:n=8:in=128:out=256:seed=101",
    "1x1024/1": "c=1:n=12:in=1024:out=1:seed=102",
    "1x16384/1": "c=1:n=6:in=16384:out=1:seed=103",
    "1x16384/1 cached": "c=1:n=10:in=16384:out=1:prefix=16376:seed=104",
    "8x1024/128": "c=8:n=64:in=1024:out=128:seed=105:w=4",
    "64x1024/128": "c=64:n=256:in=1024:out=128:seed=106:w=4",
    "256x1024/128": "c=256:n=512:in=1024:out=128:seed=107:w=4",
    "256x256/256": "c=256:n=512:in=256:out=256:seed=108:w=4",
    "24/s 1024/128": "q=24:n=360:in=1024:out=128:seed=109:w=4",
}
# Between the seeds of a row's runs.
REPEAT_SEED = 100_003
HTTP, GRPC, METRICS = 21510, 21511, 21512


def nereid_command(model: Path, repository: Path, settings: list[str], frontends: int) -> list[str]:
    """Adds the model to a repository of its own and gives the command that serves it."""
    add = [sys.executable, "-m", "engine.serving.launch.cli", "add", str(model), "--name", model.name]
    add += ["--model-repository", str(repository), "--no-tokenizer", "--no-ensemble", "--frontends", str(frontends)]
    for setting in settings:
        add += ["--set", setting]
    subprocess.run(add, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ports = ["--http-port", str(HTTP), "--grpc-port", str(GRPC), "--metrics-port", str(METRICS)]
    return [sys.executable, "-m", "engine.serving.launch.cli", "serve", "--model-repository", str(repository), *ports]


def vllm_command(model: Path, settings: list[str], environment: str) -> list[str]:
    options = " ".join(f"--{s.replace('=', ' ', 1)}" for s in settings)
    serve = (
        f"exec python3 -m vllm.entrypoints.cli.main serve {shlex.quote(str(model.absolute()))} --port {HTTP} {options}"
    )
    # not in this folder, whose packages would hide others of the same names
    return ["bash", "-c", f"cd /tmp; {environment}; export VLLM_USE_FLASHINFER_SAMPLER=0; {serve}"]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def running(command: list[str], url: str, log: Path, limit_s: float = 400) -> Iterator[tuple[psutil.Process, float]]:
    """A started server and the seconds until `url` answered. Raises RuntimeError when it does not come up."""
    began = time.perf_counter()
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while not answers(url):
            if process.poll() is not None or time.perf_counter() - began > limit_s:
                raise RuntimeError(f"the server did not come up:\n{log.read_text()[-6000:]}")
            time.sleep(0.05)
        yield psutil.Process(process.pid), time.perf_counter() - began
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def memory(server: psutil.Process) -> dict[str, Any]:
    """Resident megabytes of the server and its descendants, in all and by process; `pss` counts shared pages once."""
    rows, rss, pss = [], 0.0, 0.0
    for process in [server, *server.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            info = process.memory_full_info()
            name = " ".join(process.cmdline())[:60]
            rows.append([name, round(info.rss / 1e6)])
            rss += info.rss / 1e6
            pss += info.pss / 1e6
    return {"rss_mb": round(rss), "pss_mb": round(pss), "processes": sorted(rows, key=lambda row: -row[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", choices=("nereid", "vllm"))
    parser.add_argument("models", type=Path, help="folder of model folders")
    parser.add_argument("model")
    parser.add_argument("--json", type=Path, required=True, help="append the results to this file")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), help="rows by name; none measures the start alone")
    parser.add_argument("--specs", nargs="*", default=[], help="further specs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--env", default="true", help="shell line before vllm")
    parser.add_argument("--label", default="")
    parser.add_argument("--low", type=int, default=1000)
    parser.add_argument("--high", type=int, default=100_000, help="token ids stay below this and the vocabulary's size")
    parser.add_argument("--texts", type=Path, help="prompts: a JSON list of texts, read by the model's tokenizer")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each row")
    parser.add_argument("--longest", type=float, default=20.0, help="a row that takes more seconds is run once")
    parser.add_argument("--settle", type=float, default=0.0, help="seconds to wait before the first row")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is ended too
    model, log = args.models / args.model, args.json.with_suffix(f".{args.server}.log")
    high = min(args.high, registry.values(model)["vocab_size"])
    texts = _tokens(args.texts, model) if args.texts else []
    transport: Transport
    with tempfile.TemporaryDirectory() as scratch:
        if args.server == "nereid":
            command = nereid_command(model, Path(scratch) / "repository", args.set, args.frontends)
            ready, transport = (
                f"http://localhost:{HTTP}/v2/models/{model.name}/ready",
                GrpcTransport(f"localhost:{GRPC}", model.name),
            )
        else:
            command = vllm_command(model, args.set, args.env)
            ready, transport = (
                f"http://localhost:{HTTP}/health",
                OpenAiTransport(f"http://localhost:{HTTP}", str(model)),
            )
        common = {"server": args.server, "model": args.model, "label": args.label, "settings": args.set}

        def record(figures: dict[str, Any]) -> None:
            line = json.dumps({**common, **figures, **provenance()})
            with args.json.open("a") as file:
                file.write(line + "\n")

        with running(command, ready, log) as (server, seconds):
            print(f"{args.server} {args.model} ready after {seconds:.1f} s", flush=True)
            record({"row": "start", "ready_s": round(seconds, 2)})
            time.sleep(args.settle)
            for name, text in [(name, ROWS[name]) for name in args.rows] + [(text, text) for text in args.specs]:
                runs: list[dict[str, Any]] = []
                while len(runs) < args.repeat and (not runs or runs[0].get("seconds", 0) < args.longest):
                    spec = parse(text)
                    spec = replace(spec, seed=spec.seed + REPEAT_SEED * len(runs))
                    figures, _ = measure(transport, spec, args.processes, args.low, high, texts)
                    print(brief(name, figures), flush=True)
                    if figures["failed"] == figures["requests"]:
                        said = log.read_text()[-3000:]
                        raise RuntimeError(f"every request of {name} failed; the server said:\n{said}")
                    runs.append(figures)
                record({"row": name, **combined(runs)})
            used = memory(server)
            record({"row": "memory", **used})
            print(f"memory: {used['rss_mb']} MB resident, {used['pss_mb']} MB proportional {used['processes'][:8]}")


def _tokens(file: Path, model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_folder(model)
    return [tokenizer.encode(text) for text in json.loads(file.read_text())]


def brief(name: str, figures: dict[str, Any]) -> str:
    """One line of a row, for reading along."""
    if "ttft_ms" not in figures:
        return f"{name:18} failed: {figures.get('first_error')}"
    ttft, tpot, itl = figures["ttft_ms"], figures["tpot_ms"] or {}, figures["itl_ms"] or {}
    return (
        f"{name:18} {figures['output_tokens_per_s']:9.1f} tok/s  TTFT p50 {ttft['p50']:8.2f} p99 {ttft['p99']:8.2f}  "
        f"TPOT p50 {tpot.get('p50', 0):6.3f}  ITL p50 {itl.get('p50', 0):6.2f} p99 {itl.get('p99', 0):7.2f}  "
        f"tok/event {figures['tokens_per_event']}  failed {figures['failed']}  client {figures['client_cpu_s']} s"
    )


if __name__ == "__main__":
    main()
