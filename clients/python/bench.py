"""`nereid bench`: a small table of how a running server does at a few numbers of streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import msgspec
from rich.box import SIMPLE
from rich.table import Table

from clients.python.aio import AsyncClient
from clients.python.timing import Timing, percentile
from engine.types import SamplingParams


class Work(msgspec.Struct, frozen=True):
    """One line of the table: `streams` at a time, each with as many requests of these lengths, one after the other."""

    streams: int
    requests: int
    num_input: int
    num_output: int


class Figures(msgspec.Struct, frozen=True):
    """Times in seconds."""

    work: Work
    seconds: float
    num_tokens: int
    ttft: list[float]
    gaps: list[float]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


async def measure(
    client: AsyncClient, work: Work, vocab_size: int, seed: int, ended: Callable[[], object] = lambda: None
) -> Figures:
    """Closed loop of greedy requests over random token ids, none of them alike, so nothing comes from a cache.

    ended: called behind each request, for whoever shows how far it is."""
    params = SamplingParams(max_tokens=work.num_output, temperature=0.0, ignore_eos=True)
    rng = random.Random(seed)
    prompts = [[rng.randrange(vocab_size) for _ in range(work.num_input)] for _ in range(work.streams * work.requests)]
    timings: list[Timing] = []

    async def one_stream(mine: Sequence[list[int]]) -> None:
        for prompt in mine:
            timing = Timing()
            async with aclosing(client.stream(prompt, params)) as chunks:
                async for chunk in chunks:
                    timing.token(len(chunk.token_ids))
            timings.append(timing)
            ended()

    began = time.perf_counter()
    await asyncio.gather(*[one_stream(prompts[n :: work.streams]) for n in range(work.streams)])
    seconds = time.perf_counter() - began
    return Figures(
        work=work,
        seconds=seconds,
        num_tokens=sum(timing.num_tokens for timing in timings),
        ttft=[timing.ttft for timing in timings if timing.ttft is not None],
        gaps=[gap for timing in timings for gap in timing.gaps],
    )


def table(rows: Sequence[Figures]) -> Table:
    heads = ("streams", "requests", "in/out", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "tokens/s")
    out = Table(*heads, box=SIMPLE, padding=0, show_edge=False, caption="TTFT and ITL in ms, seen by the client")
    for row in rows:
        work = row.work
        times = [f"{percentile(v, p) * 1e3:.1f}" if v else "-" for v in (row.ttft, row.gaps) for p in (50, 99)]
        cells = [str(work.streams), str(len(row.ttft)), f"{work.num_input}/{work.num_output}", *times]
        out.add_row(*cells, f"{row.tokens_per_s:.0f}")
    return out
