"""What the models of the tokenizer's stage have in common: no engine, requests answered by threads of their own."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb

from engine.plain import line, log_to_stderr
from engine.serving.frontend import request_tensors
from engine.serving.frontend.array_guard import ArrayGuard
from engine.serving.frontend.responses import unexpected
from engine.serving.frontend.settings import SettingsError, checkpoint, template_file
from engine.serving.link.process_watch import die_with, server_pid
from engine.text import LARGE_TEXT, Tokenizer
from engine.types import ErrorCode, RequestError

logger = logging.getLogger("nereid.tokenizer")

_AT_ONCE = 8  # requests: while one renders in vain the others go on


class TextModel(ABC):
    """One instance. Requests are answered by threads through their response senders, so that none waits for another.

    parameters: those of config.pbtxt besides `model`.
    """

    parameters: tuple[str, ...] = ()
    _template: Path | None = None

    def initialize(self, args: dict[str, str]) -> None:
        self._guard = ArrayGuard().install()
        die_with(server_pid())
        log_to_stderr(f"nereid {args['model_instance_name']}: %(message)s")
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            known = {"model", *self.parameters}
            unknown = sorted(set(parameters) - known)
            if unknown:
                told = ", ".join(map(repr, sorted(known)))
                raise SettingsError(f"config.pbtxt has an unknown parameter {unknown[0]!r}: known are {told}")
            entry = Path(args["model_repository"])
            folder = checkpoint(parameters.get("model", ""), entry)
            self._tokenizer = Tokenizer.from_folder(folder)
            if "chat_template" in parameters:
                self._template = template_file(parameters["chat_template"], entry)
            self._open(folder)
        except (SettingsError, RequestError) as error:
            raise pb.TritonModelException(line(str(error))) from None
        self._threads = ThreadPoolExecutor(_AT_ONCE, "nereid-tokenizer")
        self._large = ThreadPoolExecutor(1, "nereid-large")  # texts of megabytes, which take seconds each

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._threads.submit(self._respond, request, request.get_response_sender())

    def finalize(self) -> None:
        self._threads.shutdown()
        self._large.shutdown()

    @abstractmethod
    def _open(self, folder: Path) -> None:
        """Read what else of the checkpoint is needed. Raises RequestError."""

    @abstractmethod
    def _outputs(self, tensors: Mapping[str, Any], wanted: frozenset[str], context: int) -> Mapping[str, Any]:
        """The output arrays by name, of those wanted. Raises RequestError.

        context: what a conversation's tokens are for holds so many, with an answer; 0 where the request does not say.
        """

    def _respond(self, request: Any, sender: Any) -> None:
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            large = any(_num_bytes(array) > LARGE_TEXT for array in tensors.values())
        except Exception:
            sender.send(_unexpected(), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return
        if large:
            self._large.submit(self._send, request, sender, tensors)
        else:
            self._send(request, sender, tensors)

    def _send(self, request: Any, sender: Any, tensors: Mapping[str, Any]) -> None:
        sender.send(self._answer(request, tensors), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any, tensors: Mapping[str, Any]) -> Any:
        try:
            outputs = self._outputs(
                tensors, frozenset(request.requested_output_names()), request_tensors.context(request)
            )
            return pb.InferenceResponse(output_tensors=[pb.Tensor(name, array) for name, array in outputs.items()])
        except RequestError as error:
            return pb.InferenceResponse(output_tensors=[], error=pb.TritonError(error.message, _code(error)))
        except Exception:
            return _unexpected()


def _unexpected() -> Any:
    sentence = unexpected(logger)
    return pb.InferenceResponse(output_tensors=[], error=pb.TritonError(sentence, pb.TritonError.INTERNAL))


def _num_bytes(array: Any) -> int:
    """Of an input's content; of strings, theirs."""
    return sum(map(len, array.ravel())) if array.dtype == object else int(array.nbytes)


def _code(error: RequestError) -> Any:
    """Triton's code of an error; the backend's module has them only once it runs a model."""
    codes = {
        ErrorCode.UNSUPPORTED: pb.TritonError.UNSUPPORTED,
        ErrorCode.UNAVAILABLE: pb.TritonError.UNAVAILABLE,
        ErrorCode.INTERNAL: pb.TritonError.INTERNAL,
    }
    return codes.get(error.code, pb.TritonError.INVALID_ARG)
