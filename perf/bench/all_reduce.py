"""Times sums over ranks: by the library (NCCL), and by kernels over peer memory, one-shot and two-shot, with the norm
behind them inside or apart.

    python -m perf.bench.all_reduce [--ranks 2] [--hidden 4096] [--largest 64MB] [--json FILE]

Each rank is a process with a GPU of its own, as in an engine. A figure is microseconds a call, in a CUDA graph of many,
the median of some replays on the slowest rank. Sizes are of bfloat16 rows of the hidden state. What is summed is
checked.

Without GPUs the same runs over gloo and under Triton's interpreter, at sizes of a few rows: that says that it works,
and nothing of its speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from engine import env
from engine.parallel.communicator import GroupCommunicator, connect
from engine.parallel.peers import pieces_of
from kernels.peers import Peers, piece_bytes
from kernels.registry import Op
from kernels.workspace import Workspace
from perf.provenance import provenance

KB, MB = 1 << 10, 1 << 20
CALLS, REPLAYS = 20, 9
PATIENCE_S = 120.0
EPS = 1e-6
WAYS = ("library", "one-shot", "two-shot")
# Rows of the sizes that run under the interpreter, and their width.
FEW_ROWS, NARROW = (1, 3, 16), 64

Work = Callable[[], tuple[torch.Tensor, ...]]


def works(
    communicator: GroupCommunicator, peers: Peers, x: torch.Tensor, weight: torch.Tensor, workspace: Workspace
) -> dict[str, Work]:
    """Each way of summing x [T, E], alone and with a residual and a norm of `weight` [E]; a way gives the sum first.
    The library's sums stand in the place of what they add, and grow from call to call."""
    residual, alone, apart = torch.ones_like(x), x.clone(), x.clone()
    summed, normed = Op("peer_sum").bound(workspace), Op("rms_norm").bound(workspace)

    def by_peers(two_shot: bool, norm: bool) -> Work:
        if norm:
            return lambda: summed(x, peers, two_shot, residual, weight, EPS)[::-1]
        return lambda: summed(x, peers, two_shot)[1:]

    return {
        "library": lambda: (communicator.all_reduce(alone),),
        "one-shot": by_peers(False, False),
        "two-shot": by_peers(True, False),
        "library, norm apart": lambda: normed(communicator.all_reduce(apart), weight, EPS, residual)[::-1],
        "one-shot, norm apart": lambda: normed(summed(x, peers, False)[1], weight, EPS, residual)[::-1],
        "one-shot, norm inside": by_peers(False, True),
        "two-shot, norm inside": by_peers(True, True),
    }


def check(communicator: GroupCommunicator, given: tuple[torch.Tensor, ...], hidden: int) -> None:
    """What ranks that each add their number, from 1 on, to a residual of 1 or none must have got."""
    total = communicator.size * (communicator.size + 1) / 2 + (len(given) - 1)
    if not bool((given[0] == total).all()):
        raise SystemExit(f"rank {communicator.rank}: the sum of {hidden} columns is wrong")
    if len(given) == 2 and not torch.allclose(given[1].float(), torch.ones_like(given[1]).float(), atol=1e-2):
        raise SystemExit(f"rank {communicator.rank}: the norm of {hidden} columns is wrong")


def seconds(work: Work, communicator: GroupCommunicator) -> float:
    """Of one call."""
    if communicator.device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            work()
    taken = []
    for _ in range(REPLAYS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        communicator.all_gather_numbers([0])
        torch.cuda.synchronize()
        begun.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize()
        taken.append(begun.elapsed_time(ended) / 1e3 / CALLS)
    return statistics.median(taken)


def measured(rank: int, size: int, folder: Path, hidden: int, largest: int) -> list[dict[str, Any]]:
    """A line for each size: microseconds of each way, the same on all ranks; none of a way that has no place for it."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    communicator = connect(FileStore(str(folder / "store"), size), rank, size, device, PATIENCE_S)
    assert isinstance(communicator, GroupCommunicator)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    width = hidden if on_gpu else NARROW
    rows = [1 << power for power in range(32) if (width * dtype.itemsize) << power <= largest] if on_gpu else FEW_ROWS
    made, why = pieces_of(communicator, piece_bytes(size, rows[-1] * width * dtype.itemsize), device)
    if made is None:
        raise SystemExit(f"rank {rank} cannot be measured: {why}")
    peers, workspace = Peers.over(rank, made[0]), Workspace(device)
    weight = torch.ones(width, dtype=dtype, device=device)
    lines = []
    for count in rows:
        x = torch.full((count, width), float(rank + 1), dtype=dtype, device=device)
        line: dict[str, Any] = {"bytes": x.nbytes, "ranks": size}
        for name, work in works(communicator, peers, x, weight, workspace).items():
            if name.startswith("one-shot") and x.nbytes > peers.slot:
                line[name] = None
                continue
            check(communicator, work(), width)
            own = round(seconds(work, communicator) * 1e9)
            line[name] = max(ns for (ns,) in communicator.all_gather_numbers([own])) / 1e3
        lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> list[str]:
    """A Markdown table, the fastest sum of each size marked."""
    names = [name for name, value in lines[0].items() if isinstance(value, float)]
    made = [f"| bytes | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    for line in lines:
        best = min((way for way in WAYS if line[way] is not None), key=lambda way: float(line[way]))
        cells = ["-" if line[n] is None else f"**{line[n]:.1f}**" if n == best else f"{line[n]:.1f}" for n in names]
        made.append(f"| {sized(line['bytes'])} | {' | '.join(cells)} |")
    return made


def sized(count: int) -> str:
    return f"{count / MB:g} MB" if count >= MB else f"{count / KB:g} KB"


def parse_size(text: str) -> int:
    """From 8KB or 64MB."""
    unit = {"KB": KB, "MB": MB}.get(text[-2:].upper())
    if unit is None or not text[:-2].isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 64MB or 512KB")
    return int(text[:-2]) * unit


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 65), metavar="N", help="default: 2")
    parser.add_argument("--hidden", type=int, default=4096, help="columns of a row; default: 4096")
    parser.add_argument("--largest", type=parse_size, default=64 * MB, metavar="SIZE", help="default: 64MB")
    parser.add_argument("--json", type=Path, help="append a line for each size to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.rank is None:
        return _start(args)
    lines = measured(args.rank, args.ranks, args.folder, args.hidden, args.largest)
    if args.rank == 0:
        where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU: figures say nothing of speed"
        print(f"Microseconds of a sum over {args.ranks} ranks ({where}).\n")
        print("\n".join(table(lines)))
        if args.json is not None:
            with args.json.open("a") as file:
                file.writelines(json.dumps({**provenance(), **line}) + "\n" for line in lines)
    return 0


def _start(args: argparse.Namespace) -> int:
    """All ranks as processes; 1 when one fails."""
    given = ["--ranks", str(args.ranks), "--hidden", str(args.hidden), "--largest", f"{args.largest // KB}KB"]
    if args.json is not None:
        given += ["--json", str(args.json)]
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "perf.bench.all_reduce", *given, "--folder", folder]
        processes = []
        for rank in range(args.ranks):
            own = env.one_gpu(rank) if on_gpu else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen([*command, "--rank", str(rank)], env=env.inherited(**own)))
        failed = False
        while any(process.poll() is None for process in processes) and not failed:
            time.sleep(0.1)
            failed = any(process.poll() not in (None, 0) for process in processes)
        for process in processes:
            if process.poll() is None:
                process.kill()  # it waits for one that is gone
            failed |= process.wait() != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
