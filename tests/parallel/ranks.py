"""Ranks as threads of one process, which talk over gloo as processes do."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed import HashStore

from engine.api import Engine
from engine.parallel.communicator import Communicator, connect
from engine.parallel.follower import follow
from engine.parallel.leader import LeadingRunner

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.runner.runner import DeviceRunner

T = TypeVar("T")
PATIENCE_S = 60.0


def together(size: int, work: Callable[[Communicator], T]) -> list[T]:
    """What each rank's `work` gives. An error of one is raised, once all have ended."""
    store = HashStore()

    def run(rank: int) -> T:
        return work(connect(store, rank, size, torch.device("cpu"), PATIENCE_S))

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]


def with_engine(
    config: EngineConfig, use: Callable[[Engine], T], prepare: Callable[[DeviceRunner], None] | None = None
) -> T:
    """What `use` gives of an engine whose ranks are threads. Others do what the first tells them, as processes do.
    prepare: done with each rank's runner."""
    from engine.runner.build import build_runner

    told: list[SimpleQueue[bytes | None]] = [SimpleQueue() for _ in range(config.parallel.tensor - 1)]

    def send(message: bytes | None) -> None:
        for queue in told:
            queue.put(message)

    def work(communicator: Communicator) -> T | None:
        runner = build_runner(config, communicator=communicator)
        if prepare is not None:
            prepare(runner)
        if communicator.rank:
            follow(runner, iter(told[communicator.rank - 1].get, None))  # type: ignore[arg-type]
            return None
        engine = Engine(LeadingRunner(runner, send, lambda: None, lambda: None), config)
        try:
            return use(engine)
        finally:
            engine.close()
            send(None)

    return together(config.parallel.tensor, work)[0]  # type: ignore[return-value]
