"""One of several processes with a GPU each that add up over peer memory.

    python -m tests.parallel.gpu_ranks RANK SIZE FOLDER

Plays the calls of `peer_ranks`, as they come and in a captured graph that is replayed, and writes what it got into
FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore

from engine.parallel.communicator import GroupCommunicator, connect
from engine.parallel.peers import over, pieces_of
from kernels.peers import piece_bytes
from tests.parallel.peer_ranks import CALLS, CAPACITY, EPS, PATIENCE_S, exchange, peer_ops, play

Given = list[tuple[torch.Tensor, ...]]
REPLAYS = 3


def captured(peers: Any, rank: int, device: torch.device) -> list[Given]:
    """What each replay of one graph of all calls gives."""
    inputs = [call.inputs(number, rank).to(device) for number, call in enumerate(CALLS)]
    around = [tuple(t.to(device) for t in call.around(number)) for number, call in enumerate(CALLS)]
    graph = torch.cuda.CUDAGraph()
    given: Given = []
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call, x, (residual, weight) in zip(CALLS, inputs, around, strict=True):
            peers._two_shot = lambda x, way=call.two_shot: way
            if call.normed:
                given.append(peers.all_reduce_with_norm(x, residual, weight, EPS, 1.0))
            else:
                given.append((peers.all_reduce(x),))
    made = []
    for _ in range(REPLAYS):
        for tensors in given:
            for tensor in tensors:
                tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        made.append(on_host(given))
    return made


def on_host(given: Given) -> Given:
    return [tuple(tensor.cpu() for tensor in tensors) for tensors in given]


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cuda", 0)
    communicator = connect(FileStore(str(folder / "store"), size), rank, size, device, PATIENCE_S)
    assert isinstance(communicator, GroupCommunicator)
    made, why = pieces_of(communicator, piece_bytes(size, CAPACITY), device)
    assert made is not None, why
    peers: Any = over(communicator, made[0], peer_ops(device), made[1])
    given = [on_host(play(peers, rank, range(len(CALLS)), device)), *captured(peers, rank, device)]
    torch.save((given, on_host([exchange(peers, rank, size, device) for _ in range(3)])), folder / f"{rank}.pt")
    communicator.all_gather_numbers([rank])


if __name__ == "__main__":
    main()
