"""What the OpenAI shim costs: time to first token and tokens a second, beside gRPC direct in the same run.

    python -m perf.bench.shim [--replay 1 | --triton HOST:GRPC_PORT] [--workers 1 2 4] [--streams 128] [--tokens 400]
                        [--rounds 3] [--requests 60] [--processes 4] [--json OUT]

For each number of workers it starts a shim and sends the same requests (token ids in, a stream of its own each)
straight to Triton and through the shim, in turns: `--requests` one after the other for the time to first token, then
`--streams` at once for the rate. Without `--triton` it starts a tritonserver with the demo model. With `--replay N`, N
processes of `perf.bench.replay`, which send tokens as fast as gRPC does, stand in its place, so that the shim is what
bounds the rate.

Tokens a CPU-second are the workers' own CPU time over the tokens they relayed: what one of them carries on a core of
its own, however slow the engine behind it is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from clients.python.local_server import LocalServer, free_ports
from perf.bench.serving import GrpcTransport, OpenAiTransport, Raw, Transport, measure
from perf.provenance import provenance
from perf.workload import parse

PROMPT_TOKENS = 16
VOCABULARY = (10, 500)  # ids of prompts, which every tokenizer has


class AllServers(GrpcTransport):
    """gRPC direct, over one connection a server, in turns."""

    def __init__(self, addresses: Sequence[str], model: str) -> None:
        super().__init__(addresses[0], model)
        self._servers = [GrpcTransport(address, model) for address in addresses]

    async def open(self) -> None:
        for server in self._servers:
            await server.open()
        self._turns = itertools.cycle(self._servers)

    async def send(self, body: bytes) -> tuple[list[Raw], str | None]:
        return await next(self._turns).send(body)

    async def close(self) -> None:
        for server in self._servers:
            await server.close()


class BareHttp(OpenAiTransport):
    """HTTP/1.1 over plain connections: a client library's own time (httpx: a millisecond) is not the shim's."""

    async def open(self) -> None:
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, body: bytes) -> tuple[list[Raw], str | None]:
        place = urlsplit(self.url)
        if not self._idle:
            self._idle.append(await asyncio.open_connection(place.hostname, place.port, limit=1 << 20))
        reader, writer = self._idle.pop()
        head = f"POST {place.path} HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        events: list[Raw] = []
        status = await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
        rest = b""
        while not rest.endswith(b"0\r\n\r\n"):
            chunk = await reader.read(1 << 16)
            if not chunk:
                return events, f"the connection closed early after {status.decode().strip()}"
            now = time.perf_counter()
            lines = (rest + chunk).split(b"\n")
            rest = b"\n".join(lines[-3:])  # what may yet become an event or the last chunk
            events += [(now, line) for line in lines[:-3] if line.startswith(b"data:")]
        self._idle.append((reader, writer))
        return events, None if b" 200 " in status else f"HTTP {status.decode().strip()}"

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def spread(values: Sequence[float]) -> str:
    digits = 0 if max(values) > 1000 else 2
    middle, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low}..{high})"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and its children."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def compare(args: argparse.Namespace, workers: int, direct: Transport, through: Transport, pid: int) -> dict[str, Any]:
    """One line of the table: `rounds` times both ways in turns."""
    ways = {"direct": direct, "shim": through}
    ttft: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    relayed, cpu = 0, 0.0
    for number in range(args.rounds):
        for name, transport in ways.items():
            spec = parse(f"c=1:n={args.requests}:in={PROMPT_TOKENS}:out=4:seed={number}:w=5")
            ttft[name].append(checked(*measure(transport, spec, 1, *VOCABULARY))["ttft_ms"]["p50"])
    for number in range(args.rounds):
        for name, transport in ways.items():
            load = f"c={args.streams}:n={2 * args.streams}:in={PROMPT_TOKENS}:out={args.tokens}:seed={number}:w=2"
            before = cpu_seconds(pid)
            figures = checked(*measure(transport, parse(load), args.processes, *VOCABULARY))
            rates[name].append(figures["output_tokens_per_s"])
            if name == "shim":
                cpu, relayed = cpu + cpu_seconds(pid) - before, relayed + figures["output_tokens"]
    return {
        "workers": workers,
        "streams": args.streams,
        "ttft_p50_ms": ttft,
        "ttft_added_ms": [s - d for s, d in zip(ttft["shim"], ttft["direct"], strict=True)],
        "tokens_per_s": rates,
        "tokens_per_s_a_worker": [rate / workers for rate in rates["shim"]],
        "cpu_us_a_token": 1e6 * cpu / relayed,
        "tokens_per_cpu_s": relayed / cpu,
    }


def checked(figures: dict[str, Any], _: Any) -> dict[str, Any]:
    if figures["failed"] or figures["short"]:
        raise SystemExit(f"{figures['failed']} requests failed: {figures.get('first_error')}")
    return figures


def show(rows: Sequence[dict[str, Any]]) -> None:
    heads = ("workers", "TTFT direct", "TTFT shim", "added", "direct tok/s", "shim tok/s", "a worker", "tok/CPU-s")
    table = Table(*heads, title="medians of rounds (least to most); TTFT p50 in ms")
    for row in rows:
        ttft, rate = row["ttft_p50_ms"], row["tokens_per_s"]
        cells = [ttft["direct"], ttft["shim"], row["ttft_added_ms"], rate["direct"], rate["shim"]]
        cells.append(row["tokens_per_s_a_worker"])
        table.add_row(str(row["workers"]), *map(spread, cells), f"{row['tokens_per_cpu_s']:,.0f}")
    Console(width=190).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--replay", type=int, metavar="N", help="N servers that only send, in place of tritonserver")
    server.add_argument("--triton", help="host:port of a running server's gRPC")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--workers", type=int, nargs="+", default=[1])
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=60, help="of a round, for the time to first token")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        if args.replay:
            addresses = [f"127.0.0.1:{port}" for port in free_ports(args.replay)]
            for address in addresses:
                start(stack, "perf.bench.replay", address.rsplit(":", 1)[1], str(args.tokens))
        else:
            addresses = [args.triton or stack.enter_context(LocalServer()).grpc]
        for workers in args.workers:
            with ExitStack() as one:
                (port,) = free_ports(1)
                flags = ["--port", str(port), "--log-level", "warning", "--workers", str(workers), "--no-affinity"]
                for address in addresses:
                    flags += ["--triton", address]
                pid = start(one, "clients.openai", *flags)
                url = f"http://127.0.0.1:{port}"
                wait_for(url, pid)
                transports = AllServers(addresses, args.model), BareHttp(url, args.model)
                rows.append(compare(args, workers, *transports, pid))
    show(rows)
    if args.json is not None:
        servers = f"{args.replay} of perf.bench.replay" if args.replay else "tritonserver"
        args.json.write_text(json.dumps({"servers": servers, **provenance(), "rows": rows}, indent=1) + "\n")


def start(stack: ExitStack, module: str, *arguments: str) -> int:
    """Run a module until `stack` is left; its process id."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process.pid


def wait_for(url: str, pid: int) -> None:
    """Until process `pid` serves a model at `url`."""
    end = time.monotonic() + 60
    while time.monotonic() < end and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"the shim at {url} did not get ready")


if __name__ == "__main__":
    main()
