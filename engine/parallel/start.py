"""From settings to a rank's runner: where ranks meet, then what `build_runner` does. Imports torch."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import TCPStore

from engine.config import EngineConfig
from engine.models.reader import ConfigError
from engine.parallel.communicator import connect
from engine.runner.build import Progress, build_runner, device_of
from engine.runner.runner import DeviceRunner
from kernels.compilation.ahead import Elsewhere

# Ranks import and read for different lengths of time before they meet.
MEET_S = 600.0


def runner_of(
    config: EngineConfig,
    rank: int,
    port: int,
    listener: int | None = None,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> DeviceRunner:
    """The runner of `rank`. listener: the first rank's listening socket at `port`, which it gives away.

    Raises ConfigError, WeightsError, ValueError or GroupError, each with a sentence for the user.
    """
    device, size = device_of(config), config.parallel.tensor
    if rank == 0 and device.type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"parallel.tensor = {size} needs a GPU for each rank, and {torch.cuda.device_count()} are visible: lower "
            "it, or set runtime.device to cpu"
        )
    first, patience = rank == 0, timedelta(seconds=MEET_S)
    store = TCPStore("127.0.0.1", port, None, first, patience, wait_for_workers=False, master_listen_fd=listener)
    communicator = connect(store, rank, size, device, MEET_S)
    return build_runner(config, progress, elsewhere, communicator)
