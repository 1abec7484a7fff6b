"""From settings to a rank's runner: where ranks meet, then what `build_runner` does. Imports torch."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed import TCPStore

from engine.config import EngineConfig
from engine.models.reader import ConfigError
from engine.parallel.communicator import GroupError, connect
from engine.parallel.host_link import MEET_S
from engine.parallel.rendezvous import Rendezvous
from engine.runner.build import Progress, build_runner, device_of
from engine.runner.runner import DeviceRunner
from engine.types import shown
from kernels.compilation.ahead import Elsewhere

_DEVICE = "device"


def runner_of(
    config: EngineConfig,
    rank: int,
    rendezvous: Rendezvous,
    listener: int | None = None,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> DeviceRunner:
    """The runner of `rank`. listener: the first rank's listening socket at the rendezvous's port, which it gives away.

    Raises ConfigError, WeightsError, ValueError or GroupError, each with a sentence for the user.
    """
    device, size = device_of(config), config.parallel.tensor
    if rank == 0 and device.type == "cuda" and torch.cuda.device_count() < rendezvous.local:
        raise ConfigError(
            f"parallel.tensor = {size} needs a GPU for each of {rendezvous.local} ranks here, and "
            f"{torch.cuda.device_count()} are visible: lower it, set runtime.device to cpu, or start ranks on other "
            "hosts (docs/parallel.md)"
        )
    first, patience = rank == 0, timedelta(seconds=MEET_S)
    try:
        store = TCPStore(
            rendezvous.address,
            rendezvous.port,
            None,
            first,
            patience,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        if first:
            store.set(_DEVICE, device.type)
        computed_on = store.get(_DEVICE).decode()
    except RuntimeError as error:
        raise GroupError(f"rank {rank} of {size} does not find the first: {shown(str(error), 200)}") from None
    if computed_on != device.type:
        raise ConfigError(
            f"rank {rank} has {'no usable GPU' if device.type == 'cpu' else 'a GPU'}, and the first rank computes on "
            f"{computed_on}: give every rank the same, or set runtime.device"
        )
    communicator = connect(store, rank, size, device, MEET_S, rendezvous.own)
    return build_runner(config, progress, elsewhere, communicator)
