"""A frontend with its link and supervisor in this process, over engine processes of `scripted_host`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from engine.config import EngineConfig
from engine.serving.frontend.frontend import Frontend
from engine.serving.frontend.intake import Served
from engine.serving.frontend.metrics import Metrics
from engine.serving.frontend.responses import Responses
from engine.serving.frontend.settings import FrontendConfig
from engine.serving.frontend.stream_table import StreamTable
from engine.serving.frontend.supervisor import Supervisor
from engine.serving.link.engine_view import EngineView
from engine.serving.link.link import Link
from engine.serving.link.run_folder import RunFolder
from engine.text import Tokenizer
from tests.serving import stub
from tests.serving.stub import Request

LONG = {"max_tokens": 120, "temperature": 0, "ignore_eos": True}


class Rig:
    """Everything a stub holds, in this process. entered: called with the run folder before anything runs in it."""

    def __init__(
        self,
        root: Path,
        tokenizer: Tokenizer,
        model: str,
        config: FrontendConfig,
        name: str = "f0",
        entered: Callable[[RunFolder], object] = lambda folder: None,
    ) -> None:
        self.log: list[str] = []
        self.folder = RunFolder(root, os.getpid(), "model")
        self.folder.enter()
        entered(self.folder)
        self.metrics = Metrics(stub.BACKEND, "m", "1")
        self.tokenizer = tokenizer
        self.engine = EngineView()
        self.link = Link(self.folder, name, self.engine)
        self.supervisor = Supervisor(
            self.folder,
            "m",
            EngineConfig(model=model),
            restart_limit=config.restart_limit,
            hang_timeout_s=config.hang_timeout_s,
            engine=self.engine,
            module="tests.serving.scripted_host",
        )
        self.frontend = Frontend(
            Served(name, tokenizer),
            config,
            StreamTable("m", self.link, self.engine, max_held=4),
            self.engine,
            Responses(stub.BACKEND),
            self.metrics,
            verbose=self.log.append,
        )
        self.frontend.start()
        self.metrics.start()
        self.link.start(self.frontend)
        self.supervisor.start()
        self._connected = True

    def submit(self, seed: int = 0, stream: bool = True) -> Request:
        request = Request(parameters=LONG, input_ids=[2, 3, 4 + seed], stream=stream)
        self.frontend.submit(request)
        return request

    def engine_pid(self) -> int:
        state = self.folder.read_state()
        assert state is not None
        return state.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.engine_pid(), number)

    def disconnect(self) -> None:
        """End all but the engine, which ends when no frontend is connected any more."""
        if not self._connected:
            return
        self._connected = False
        self.frontend.close("closed by the test")
        self.supervisor.stop()
        self.link.close()

    def close(self) -> None:
        self.disconnect()
        with self.folder.leave() as last:
            if last:
                self.supervisor.close_engine()
        self.metrics.close()
