"""Ranks as threads of one process, which talk over gloo as processes do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.distributed import HashStore

from engine.parallel.communicator import Communicator, connect

T = TypeVar("T")
PATIENCE_S = 60.0


def together(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What each rank's `work` gives. An error of one is raised, once all have ended."""
    store = HashStore()

    def run(rank: int) -> T:
        return work(connect(store, rank, size, torch.device("cpu"), PATIENCE_S))

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
