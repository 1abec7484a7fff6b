"""What the OpenAI shim costs: time to first token over gRPC direct, and CPU time a relayed token.

    python -m perf.shim [--replay | --triton localhost:8001 --shim http://localhost:9000 --pid PID] [--model demo]
                        [--requests 40] [--streams 16] [--tokens 64] [--json OUT]

Without addresses it starts a server and a shim of its own; with --replay, a shim in front of `perf.replay`, which sends
tokens as fast as gRPC does, so that the shim is what bounds the rate. The two ways take turns request by request, so
that both see the same machine. Tokens per CPU-second are the worker's own CPU time (utime and stime of its process)
over the tokens it relayed: what one worker can carry on a core of its own, however slow the engine behind it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from clients.python.aio import AsyncClient
from clients.python.bench import percentile
from clients.python.local_server import LocalServer, free_ports
from engine.types import SamplingParams

PROMPT = "def read(path):"


async def direct_ttft(client: AsyncClient) -> float:
    start = time.perf_counter()
    async with aclosing(
        client.stream(PROMPT, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    ) as chunks:
        async for _ in chunks:
            first = time.perf_counter() - start
            break
    return first


async def shim_ttft(http: httpx.AsyncClient, model: str) -> float:
    start = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body(model, 2)) as response:
        async for _ in response.aiter_raw():
            return time.perf_counter() - start
    raise RuntimeError(f"the shim answered {response.status_code} without a token")


async def relay(http: httpx.AsyncClient, model: str, streams: int, tokens: int) -> None:
    async def one() -> None:
        async with http.stream("POST", "/v1/completions", json=body(model, tokens)) as response:
            async for _ in response.aiter_raw():
                pass

    await asyncio.gather(*(one() for _ in range(streams)))


def body(model: str, tokens: int) -> dict[str, Any]:
    fields = {"model": model, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**fields, "max_tokens": tokens}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process (proc(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with (
        AsyncClient(args.triton, args.model) as client,
        httpx.AsyncClient(base_url=args.shim, timeout=120, limits=limits) as http,
    ):
        for _ in range(3):
            await direct_ttft(client)
            await shim_ttft(http, args.model)
        direct, through = [], []
        for _ in range(args.requests):
            direct.append(await direct_ttft(client))
            through.append(await shim_ttft(http, args.model))
        cpu, start = cpu_seconds(args.pid), time.perf_counter()
        await relay(http, args.model, args.streams, args.tokens)
        seconds, cpu = time.perf_counter() - start, cpu_seconds(args.pid) - cpu
    count = args.streams * args.tokens
    return {
        "ttft_direct_p50_ms": 1000 * statistics.median(direct),
        "ttft_shim_p50_ms": 1000 * statistics.median(through),
        "ttft_added_p50_ms": 1000 * (statistics.median(through) - statistics.median(direct)),
        "ttft_direct_p95_ms": 1000 * percentile(direct, 0.95),
        "ttft_shim_p95_ms": 1000 * percentile(through, 0.95),
        "streams": args.streams,
        "tokens_per_s": count / seconds,
        "cpu_us_per_token": 1e6 * cpu / count,
        "tokens_per_cpu_s": count / max(cpu, 1e-9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the OpenAI shim costs.")
    parser.add_argument("--replay", action="store_true", help="a server that only sends, in place of tritonserver")
    parser.add_argument("--triton", help="host:port of a running server's gRPC")
    parser.add_argument("--shim", help="URL of a running shim with one worker")
    parser.add_argument("--pid", type=int, help="process id of that worker")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if len({args.triton is None, args.shim is None, args.pid is None}) != 1:
        parser.error("--triton, --shim and --pid go together")
    with ExitStack() as stack:
        if args.triton is None:
            (port, replay) = free_ports(2)
            if args.replay:
                args.triton = f"127.0.0.1:{replay}"
                start(stack, "perf.replay", str(replay), str(args.tokens))
            else:
                args.triton = stack.enter_context(LocalServer()).grpc
            flags = ["--port", str(port), "--log-level", "warning", "--triton", args.triton, "--health-interval", "0.2"]
            args.shim, args.pid = f"http://127.0.0.1:{port}", start(stack, "clients.openai", *flags)
            wait_for(args.shim)
        figures = asyncio.run(measure(args))
    table = Table("", "")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else str(value))
    Console().print(table)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def start(stack: ExitStack, module: str, *arguments: str) -> int:
    """Run a module until `stack` is left; its process id."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


def wait_for(url: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the shim at {url} did not get ready")


if __name__ == "__main__":
    main()
