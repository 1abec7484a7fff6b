"""The Python backend's model class of an LLM: one instance is one frontend, all instances share one engine process."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb

from engine import env, heap
from engine.plain import line, log_to_stderr
from engine.serving.frontend.array_guard import ArrayGuard
from engine.serving.frontend.settings import ModelSettings, SettingsError, parse
from engine.serving.frontend.supervisor import Supervisor
from engine.serving.link.engine_view import EngineView
from engine.serving.link.link import Link
from engine.serving.link.process_watch import die_with, server_pid
from engine.serving.link.run_folder import RunFolder, RunFolderError, model_key
from engine.types import RequestError

if TYPE_CHECKING:
    from engine.serving.frontend.frontend import Frontend
    from engine.serving.frontend.metrics import Metrics
    from engine.serving.frontend.spans import EngineSpans
    from engine.text import Tokenizer

_LOOK_S, _MAX_LOOKS = 1.0, 20


class TritonPythonModel:
    """Triton calls initialize, then execute for each batch of requests, then finalize."""

    def initialize(self, args: dict[str, str]) -> None:
        """Start or join the model's engine process and wait until it is ready.

        Raises TritonModelException with the engine's own sentence when it cannot load.
        """
        self._guard = ArrayGuard().install()
        die_with(server_pid())
        log_to_stderr(f"nereid {args['model_instance_name']}: %(message)s")
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        folder = Path(args["model_repository"])
        try:
            settings = parse(parameters, folder)
        except SettingsError as error:
            raise pb.TritonModelException(line(str(error))) from None
        name, version = args["model_name"], args["model_version"]
        self._name = name
        label = f"{args['model_instance_name']}.{os.getpid()}"  # one that takes a dead one's place has its name
        self._drain_s = settings.frontend.drain_s
        engine_name = settings.frontend.engine or name
        self._reach_engine(settings, engine_name, model_key(engine_name, version, settings.engine), label)
        # The engine's process imports torch while this one imports its own modules and reads the tokenizer.
        from engine.serving.frontend.metrics import Metrics, NoMetrics
        from engine.text import Tokenizer

        try:
            tokenizer = Tokenizer.from_folder(settings.tokenizer)
            self._spans = _spans(self._name)
        except (RequestError, ValueError) as error:
            self._leave()
            raise pb.TritonModelException(line(str(error))) from None
        heap.trim_malloc()
        # Under the entry's own name: the server would free series that another model still writes to.
        self._metrics = (
            Metrics(pb, self._name, version, settings.engine.cache, settings.engine.parallel)
            if settings.frontend.report_metrics
            else NoMetrics()
        )
        self._frontend = self._new_frontend(settings, config, tokenizer, engine_name, label)
        heap.freeze()
        heap.collect_often()
        heap.keep_trimmed()
        self._frontend.start()
        self._metrics.start()
        self._link.start(self._frontend)
        self._await_engine(settings.frontend.engine)
        if self._engine.failed is not None:
            self._shut_down("the model did not load")
            raise pb.TritonModelException(line(self._engine.failed))
        self._frontend.on_give_up = self._give_up

    def _reach_engine(self, settings: ModelSettings, engine_name: str, key: str, label: str) -> None:
        """Start the engine process, or see who does, and make the link to it."""
        self._folder = RunFolder(env.read().run_dir, server_pid(), key)
        try:
            self._folder.enter()
        except RunFolderError as error:
            raise pb.TritonModelException(line(str(error))) from None
        self._engine = EngineView()
        self._supervisor = Supervisor(
            self._folder,
            engine_name,
            settings.engine,
            restart_limit=settings.frontend.restart_limit,
            hang_timeout_s=settings.frontend.hang_timeout_s,
            engine=self._engine,
        )
        self._link = Link(self._folder, label, self._engine)
        if settings.frontend.engine is None:
            self._supervisor.start()  # the engine's own frontends see to it

    def _new_frontend(
        self, settings: ModelSettings, config: dict[str, Any], tokenizer: Tokenizer, engine_name: str, label: str
    ) -> Frontend:
        """The frontend, over the link, with the calling conventions that `config` (config.pbtxt's) has."""
        from engine.serving.frontend.description import description, min_tokens
        from engine.serving.frontend.frontend import Frontend
        from engine.serving.frontend.intake import Served
        from engine.serving.frontend.responses import Responses
        from engine.serving.frontend.stream_table import StreamTable

        scheduler = settings.engine.scheduler
        batched = bool(config.get("max_batch_size", 0))
        decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
        return Frontend(
            Served(label, tokenizer, decoupled, batched, description(settings), min_tokens(settings.tokenizer)),
            settings.frontend,
            StreamTable(engine_name, self._link, self._engine, max_held=scheduler.max_waiting + scheduler.max_rows),
            self._engine,
            Responses(pb, batched),
            self._metrics,
            self._spans,
            pb.Logger.log_verbose,
            self._folder.must_end_streams,
        )

    def _await_engine(self, shared: str | None) -> None:
        """Raises TritonModelException where the model whose engine is to be shared is not there."""
        looks = 0
        while not self._engine.settled.wait(_LOOK_S):
            looks = 0 if shared is None or self._folder.others() else looks + 1
            if looks > _MAX_LOOKS:
                self._shut_down("the model did not load")
                raise pb.TritonModelException(f"load {shared} first: this model shares its engine process")

    def is_ready(self) -> bool:
        """Whether a request would be answered now; for servers that ask (python_backend pull request 430), as 2.51 does
        not."""
        return not self._engine.problem

    def execute(self, requests: list[Any]) -> None:
        """Hand the requests over; answers go through their response senders."""
        for request in requests:
            self._frontend.submit(request)

    def finalize(self) -> None:
        """Drain, leave, and close the engine when this is the last frontend."""
        self._frontend.drain(self._drain_s)
        self._shut_down("the model is being unloaded")

    def _shut_down(self, sentence: str) -> None:
        self._frontend.close(sentence)
        if self._spans is not None:
            self._spans.close()
        self._metrics.close()
        self._leave(self._metrics)

    def _leave(self, metrics: Metrics | None = None) -> None:
        self._supervisor.stop()
        self._link.close()
        with self._folder.leave() as last:
            if last:
                self._supervisor.close_engine()
            if metrics is not None and not self._folder.other_stubs():
                metrics.remove()

    def _give_up(self) -> None:
        """Take the model out of service, so that it does not answer ready. Works where models are controlled
        explicitly (as `nereid serve` does); elsewhere requests are refused one by one."""
        if self._engine.leading:
            with contextlib.suppress(pb.TritonModelException):
                pb.unload_model(self._name)


def _spans(model: str) -> EngineSpans | None:
    """None where no collector is named. Raises ValueError for what is no endpoint, and without the SDK."""
    endpoint = env.read().otlp_endpoint
    if endpoint is None:
        return None
    try:
        from engine.serving.frontend.spans import EngineSpans
    except ImportError as error:
        raise ValueError(f"{env.OTLP_ENDPOINT}: {error.name} is missing: pip install 'nereid[tracing]'") from None
    return EngineSpans(endpoint, model)
