"""From settings to the runner of a model, however many ranks it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine import env
from engine.config import EngineConfig
from engine.parallel.group import Group
from kernels.compilation import process as compile_process

if TYPE_CHECKING:
    from engine.core.plan import Runner
    from engine.runner.build import Progress

# Why a runner's other processes cannot go on, or None.
Lost = Callable[[], BaseException | None]


def _nobody() -> None:
    return None


def open_runner(
    config: EngineConfig, progress: Progress | None = None, launched: env.Launched | None = None
) -> tuple[Runner, Lost]:
    """The runner of `config`, over all of its ranks: imports torch, starts the other ranks and reads the weights.

    progress is called with (what is being done, how much is done, how much there is). launched: by what ranks are
    started on several hosts, of which this is the first; None has all of them here. Raises what `Group` and
    `build_runner` raise.
    """
    runtime = config.runtime
    # Before torch is imported here: the helper process imports it meanwhile.
    ahead = runtime.compile_ahead == "processes"
    with compile_process.helper(runtime.device != "cpu", ahead, env.inherited()) as elsewhere:
        group = Group.of(config, launched)
        if group is not None:
            return group.lead(progress, elsewhere), group.lost
        from engine.runner.build import build_runner

        return build_runner(config, progress, elsewhere), _nobody
