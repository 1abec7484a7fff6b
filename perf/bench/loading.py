"""How fast a checkpoint is loaded, beside plain reads of the same files: seconds, GB/s, the share, memory of the host.

    python -m perf.checkpoints /tmp/checkpoints qwen3-8b qwen3-8b:awq --gb 4
    python -m perf.bench.loading measure /tmp/checkpoints/* --runs 5 --json loading.jsonl [--set weights.quantize=int4]

Plain reads take as many threads as the loader, in pieces of its buffers' size, into memory that nobody has touched: on
a GPU through pinned buffers into memory of the device. The loader fills a decoder as the engine has it fill one, from
the moment its parameters get memory; compiling kernels at the same time is off unless --set says otherwise. Each is a
process of its own; they alternate, and files are in the page cache unless --cold drops them before each. Processor
time of both is told too: where others use the cores, it says more than seconds do.

With --set parallel.tensor=N there are N processes: each plain one reads its part of the files, each loading one its
rank's slices. The slowest counts, and they share a GPU where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch

from engine.config import EngineConfig
from engine.models.gguf.names import open_folder
from engine.models.loaded import Loaded
from engine.parallel.communicator import Communicator
from engine.runner.build import build_runner, device_of
from engine.weights import loader, staging
from engine.weights.checkpoint import Checkpoint, Files
from kernels.compilation.variant import prepare
from perf.bench.engine import config_from
from perf.provenance import provenance

# What has no part in loading; --set comes behind.
ALONE = ("runtime.compile_ahead=off",)


class Done(Exception):
    """The weights are loaded, and nothing behind that is asked for."""


class OneOf(Communicator):
    """A rank that loads its slices and never computes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        return [numbers] * self.size


def measure(folder: Path, settings: list[str], runs: int, cold: bool) -> dict[str, Any]:
    """Medians of `runs` of both, and the range of the loader's share of what plain reads reach."""
    checkpoint = open_folder(folder)
    size = config_from(str(folder), [*ALONE, *settings]).parallel.tensor
    plain: list[dict[str, float]] = []
    loaded: list[dict[str, float]] = []
    for _ in range(runs):
        for way, seen in (("plain", plain), ("load", loaded)):
            if cold:
                evict(checkpoint)
            seen.append(_run(way, folder, settings, size))
    floor = statistics.median(run["seconds"] for run in plain)
    seconds = statistics.median(run["seconds"] for run in loaded)
    shares = [p["seconds"] / one["seconds"] for p, one in zip(plain, loaded, strict=True)]
    gb = checkpoint.num_bytes / 1e9
    return {
        "checkpoint": folder.name,
        "settings": settings,
        "cold": cold,
        "runs": runs,
        "gb": round(gb, 3),
        "plain_s": round(floor, 3),
        "plain_gb_s": round(gb / floor, 2),
        "load_s": round(seconds, 3),
        "load_gb_s": round(gb / seconds, 2),
        "share": round(statistics.median(shares), 3),
        "low": round(min(shares), 3),
        "high": round(max(shares), 3),
        "plain_cpu_s": round(statistics.median(run["cpu_s"] for run in plain), 3),
        "load_cpu_s": round(statistics.median(run["cpu_s"] for run in loaded), 3),
        "peak_mb": round(statistics.median(run["peak_mb"] for run in loaded)),
        "layer_mb": round(largest_layer(checkpoint) / 1e6),
    }


def largest_layer(checkpoint: Checkpoint) -> int:
    """Bytes of the layer that has most on disk."""
    sizes: Counter[str] = Counter()
    for name, entry in checkpoint.entries.items():
        found = re.search(r"layers\.(\d+)\.", name)
        if found:
            sizes[found[1]] += entry.num_bytes
    return max(sizes.values(), default=0)


def evict(checkpoint: Checkpoint) -> None:
    """Drop the files from the page cache."""
    for file in {entry.file for entry in checkpoint.entries.values()}:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _run(way: str, folder: Path, settings: list[str], size: int) -> dict[str, float]:
    """One run of every rank, begun together. The largest of each figure."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "perf.bench.loading", way, str(folder), *words]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        if rank.stdout.readline().strip() != "ready":
            for other in ranks:
                other.kill()
            raise SystemExit(f"{' '.join(command)} failed")
    said = []
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    for rank in ranks:
        said.append(json.loads(rank.communicate()[0].splitlines()[-1]))
    return {key: max(one[key] for one in said) for key in said[0]}


def _wait() -> float:
    """Until all ranks are there."""
    print("ready", flush=True)
    sys.stdin.readline()
    return time.perf_counter()


def plain(folder: Path, device: torch.device, rank: int, size: int) -> dict[str, float]:
    """Read a rank's part of the files, byte after byte."""
    pieces, files = [], Files()
    spans: dict[Path, list[int]] = {}
    for entry in open_folder(folder).entries.values():
        for part in entry.parts:
            start, end = spans.get(part.file, (part.start, 0))
            spans[part.file] = [min(start, part.start), max(end, part.start + part.span)]
    for file, (start, end) in sorted(spans.items()):
        files.open(file)
        pieces += [(file, at, min(staging.BUFFER_BYTES, end - at)) for at in range(start, end, staging.BUFFER_BYTES)]
    pieces = pieces[rank * len(pieces) // size : (rank + 1) * len(pieces) // size]
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.init()
    began, spent = _wait(), time.process_time()
    target = torch.empty(sum(count for *_, count in pieces), dtype=torch.uint8, device=device)
    work: SimpleQueue[tuple[Path, int, torch.Tensor]] = SimpleQueue()
    for (file, start, _), view in zip(pieces, target.split([count for *_, count in pieces]), strict=True):
        work.put((file, start, view))

    def drain() -> None:
        buffers = [torch.empty(staging.BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2 * cuda)]
        stream = torch.cuda.Stream(device) if cuda else None
        sent = [torch.cuda.Event() for _ in buffers]
        turn = 0
        while True:
            try:
                file, start, view = work.get_nowait()
            except Empty:
                break
            if stream is None:
                files.read_into(file, start, view.numpy().data)
                continue
            sent[turn].synchronize()
            raw = buffers[turn][: len(view)]
            files.read_into(file, start, raw.numpy().data)
            with torch.cuda.stream(stream):
                view.copy_(raw, non_blocking=True)
                sent[turn].record(stream)
            turn = 1 - turn
        if stream is not None:
            stream.synchronize()

    threads = staging.THREADS[device.type]
    with files, ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(drain) for _ in range(threads)]:
            future.result()
    return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - spent}


def load(config: EngineConfig, rank: int) -> dict[str, float]:
    """Build a decoder and have it filled. peak_mb: memory of the host beyond what was there before and, on a CPU,
    beyond the parameters."""
    if device_of(config).type == "cuda":
        prepare()  # which an engine does while it imports torch
    seen: dict[str, float] = {}
    materialize, fill = Loaded.materialize, loader.load
    size, kept = config.parallel.tensor, 0

    def timed_materialize(module: Loaded, device: torch.device) -> None:
        nonlocal kept
        began, spent = _wait(), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        seen["before"] = _resident("VmRSS")
        materialize(module, device)
        seen["seconds"], seen["cpu_s"] = time.perf_counter() - began, time.process_time() - spent
        kept = module.num_bytes if device.type == "cpu" else 0

    def timed_load(*args: Any, **named: Any) -> None:
        began, spent = time.perf_counter(), time.process_time()
        fill(*args, **named)
        seen["seconds"] += time.perf_counter() - began
        seen["cpu_s"] += time.process_time() - spent
        raise Done

    Loaded.materialize, loader.load = timed_materialize, timed_load  # type: ignore[method-assign, assignment]
    try:
        build_runner(config, communicator=None if size == 1 else OneOf(rank, size))
    except Done:
        peak = _resident("VmHWM") - seen["before"] - kept
        return {"seconds": seen["seconds"], "cpu_s": seen["cpu_s"], "peak_mb": max(peak, 0) / 1e6}
    finally:
        Loaded.materialize, loader.load = materialize, fill  # type: ignore[method-assign]
    raise AssertionError("no weights were loaded")


def _resident(field: str) -> int:
    """Bytes of this process, as the system counts them."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure", help="both, alternating")
    measuring.add_argument("folders", type=Path, nargs="+", help="checkpoint folders")
    measuring.add_argument("--runs", type=int, default=5)
    measuring.add_argument("--cold", action="store_true", help="drop the files from the page cache before each run")
    measuring.add_argument("--json", type=Path, help="append the results to this file")
    for name, help_text in (("plain", "plain reads, once"), ("load", "the loader, once")):
        once = commands.add_parser(name, help=f"{help_text}: begins when a line is written to it")
        once.add_argument("folder", type=Path)
        once.add_argument("--rank", type=int, default=0)
    for command in commands.choices.values():
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a field of EngineConfig")
    args = parser.parse_args()
    if args.command == "measure":
        for folder in args.folders:
            figures = measure(folder, args.set, args.runs, args.cold)
            print(json.dumps(figures), flush=True)
            if args.json is not None:
                with args.json.open("a") as out:
                    out.write(json.dumps({**figures, **provenance()}) + "\n")
        return
    config = config_from(str(args.folder), [*ALONE, *args.set])
    if config.parallel.tensor > 1:
        config = config_from(str(args.folder), [*ALONE, *args.set, "parallel.all_reduce=library"])
    if args.command == "plain":
        print(json.dumps(plain(args.folder, device_of(config), args.rank, config.parallel.tensor)))
    else:
        print(json.dumps(load(config, args.rank)))


if __name__ == "__main__":
    main()
