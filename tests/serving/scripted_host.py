"""An engine process without a model: the real host and engine over the scripted runner, at a pace that tests can meet.

python -m tests.serving.scripted_host ...
"""

from __future__ import annotations

import os
import signal
import sys
import time

from engine.api import Engine
from engine.config import EngineConfig
from engine.core.plan import Pending, StepPlan
from engine.serving.host import host
from tests.core.scripted_runner import ScriptedRunner, pool

STEP_S = 0.005


POISON = 13  # the first token of a prompt that kills the process in the step that begins it


class PacedRunner(ScriptedRunner):
    def launch(self, plan: StepPlan) -> Pending:
        time.sleep(STEP_S)
        if any(start.token_ids[0] == POISON for start in plan.starts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(plan)


def build(config: EngineConfig, progress: host.ProgressReport) -> Engine:
    """`model` says how it goes: "broken" does not load, "failing" loads and dies in its 70th step."""
    progress("script", 1, 1)
    if config.model == "broken":
        raise ValueError("the script says that this model does not load")
    fail_step = 70 if config.model == "failing" else None
    runner = PacedRunner(pool(num_blocks=512), vocab_size=500, fail_step=fail_step)
    return Engine(runner, config).start()


if __name__ == "__main__":
    host.main(sys.argv[1:], build)
