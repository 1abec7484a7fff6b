"""Streams through a server whose engine is killed by `kill -9`: are they what they are undisturbed?

    python -m perf.check.recovery CHECKPOINT [--set load_format=dummy] [--streams 64] [--tokens 150] [--kills 1]
    python -m perf.check.recovery CHECKPOINT --set parallel.tensor=2 --victim rank [--with STOP | --with ERROR]

Serves the checkpoint in deterministic mode, and runs the same seeded streams three times: twice undisturbed, then with
kills once every stream has begun. Exits with 1 when a stream fails, is short, or has another token in any run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from clients.python import AsyncClient, SamplingParams
from clients.python.wire import ServerError
from perf.check import planted
from perf.provenance import provenance
from perf.suite import GRPC, HTTP, nereid_command, running

# Tokens that every stream has before the engine is killed.
BEGUN = 4


@dataclass
class Stream:
    """What came of a stream: its tokens, the longest time between two chunks, and its error."""

    tokens: list[int]
    pause_s: float = 0.0
    error: str = ""


def engine_of(server: psutil.Process, model: str) -> int:
    """The pid of the engine process that serves `model` below tritonserver."""
    told = [p for p in psutil.process_iter(["cmdline"]) if "engine.serving.host" in (p.info["cmdline"] or ())]
    below = {server.pid, *(child.pid for child in server.children(recursive=True))}
    (pid,) = (p.pid for p in told if p.info["cmdline"][-1] == model and below & set(_numbers(p.info["cmdline"])))
    return pid


def victim_of(server: psutil.Process, model: str, victim: str) -> int:
    """The pid of the engine, or of the last of its ranks."""
    engine = engine_of(server, model)
    if victim == "engine":
        return engine
    ranks = [p.pid for p in psutil.Process(engine).children() if "engine.parallel.worker" in p.cmdline()]
    return ranks[-1]


def _numbers(words: Sequence[str]) -> list[int]:
    return [int(word) for word in words if word.isdigit()]


def prompts(count: int, low: int, high: int) -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(low, high) for _ in range(draw.randint(8, 300))] for _ in range(count)]


async def play(
    model: str, asked: Sequence[list[int]], tokens: int, kills: int, kill: Callable[[], None]
) -> list[Stream]:
    """The streams at once; `kill` is called when each has begun, and again when each has gone on."""
    streams = [Stream([]) for _ in asked]

    async def one(stream: Stream, prompt: list[int], seed: int) -> None:
        params = SamplingParams(temperature=0.9, seed=seed, max_tokens=tokens, ignore_eos=True)
        last = time.monotonic()
        try:
            async for chunk in client.stream(prompt, params):
                now = time.monotonic()
                stream.pause_s = max(stream.pause_s, now - last if stream.tokens else 0.0)
                stream.tokens += chunk.token_ids
                last = now
        except ServerError as error:
            stream.error = str(error)

    async with AsyncClient(f"localhost:{GRPC}", model) as client:
        tasks = [
            asyncio.ensure_future(one(stream, prompt, seed))
            for seed, (stream, prompt) in enumerate(zip(streams, asked, strict=True))
        ]
        for number in range(kills):
            wanted = BEGUN * (number + 1)
            while not all(task.done() or len(s.tokens) >= wanted for task, s in zip(tasks, streams, strict=True)):
                await asyncio.sleep(0.002)
            assert not all(task.done() for task in tasks), "the streams were over before the engine was killed"
            kill()
        await asyncio.gather(*tasks)
    return streams


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--victim", choices=("engine", "rank"), default="engine", help="rank: the last of several")
    parser.add_argument("--with", choices=("KILL", "STOP", "ERROR"), default="KILL", dest="sent")
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--low", type=int, default=1000)
    parser.add_argument("--high", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is ended too
    asked = prompts(given.streams, given.low, given.high)
    name = given.model.name
    ranks = dict(setting.split("=", 1) for setting in given.set).get("parallel.tensor", "1")
    rank = 0 if given.victim == "engine" else int(ranks) - 1
    with tempfile.TemporaryDirectory() as scratch:
        settings = ["runtime.deterministic=true", *given.set]
        command = nereid_command(given.model.absolute(), Path(scratch) / "repository", settings, given.frontends)
        ready = f"http://localhost:{HTTP}/v2/models/{name}/ready"
        if given.sent == "ERROR":
            os.environ.update(planted.environment(Path(scratch)))
        with running(command, ready, Path(scratch) / "log") as (server, seconds):

            def kill() -> None:
                if given.sent == "ERROR":
                    planted.plant(Path(scratch), rank)
                else:
                    os.kill(victim_of(server, name, given.victim), signal.Signals[f"SIG{given.sent}"])

            runs = [asyncio.run(play(name, asked, given.tokens, kills, kill)) for kills in (0, 0, given.kills)]
    first = [stream.tokens for stream in runs[0]]
    found = {
        "streams": given.streams,
        "tokens": given.tokens,
        "kills": given.kills,
        "victim": given.victim,
        "signal": given.sent,
        "ready_s": round(seconds, 1),
        "errors": sum(bool(stream.error) for run in runs for stream in run),
        "short": sum(len(stream.tokens) != given.tokens for run in runs for stream in run),
        "different_undisturbed": sum(a != b.tokens for a, b in zip(first, runs[1], strict=True)),
        "different_with_kills": sum(a != b.tokens for a, b in zip(first, runs[2], strict=True)),
        "longest_pause_s": round(max(stream.pause_s for stream in runs[2]), 2),
    }
    line = json.dumps({**found, "settings": settings, **provenance()})
    print(line)
    for stream in [stream for run in runs for stream in run if stream.error][:3]:
        print(stream.error)
    if given.json:
        with given.json.open("a") as file:
            file.write(line + "\n")
    wrong = ("errors", "short", "different_undisturbed", "different_with_kills")
    return 1 if any(found[key] for key in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
