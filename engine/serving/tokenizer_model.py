"""The Python backend's model class of a tokenizer: text or chat messages to ids, ids to text."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from engine.serving import decode, protocol
from engine.serving.array_guard import ArrayGuard
from engine.serving.process_watch import die_with
from engine.serving.renderer import Renderer
from engine.serving.responses import unexpected
from engine.serving.settings import SettingsError, checkpoint
from engine.text import Tokenizer
from engine.types import ErrorCode, RequestError

logger = logging.getLogger("nereid.tokenizer")

_AT_ONCE = 8  # requests: while one renders in vain, or is megabytes long, the others go on


class TritonPythonModel:
    """One instance. Requests are answered by threads through their response senders, so that none waits for another."""

    def initialize(self, args: dict[str, str]) -> None:
        self._guard = ArrayGuard().install()
        die_with(os.getppid())
        logging.basicConfig(level=logging.INFO, format=f"nereid {args['model_instance_name']}: %(message)s")
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            unknown = sorted(set(parameters) - {"model"})
            if unknown:
                raise SettingsError(f"config.pbtxt has an unknown parameter {unknown[0]!r}: known is 'model'")
            folder = checkpoint(parameters.get("model", ""), Path(args["model_repository"]))
            self._tokenizer = Tokenizer.from_folder(folder)
            self._renderer = Renderer(folder)
        except (SettingsError, RequestError) as error:
            raise pb.TritonModelException(str(error)) from None
        self._threads = ThreadPoolExecutor(_AT_ONCE, "nereid-tokenizer")

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self._threads.submit(self._respond, request, request.get_response_sender())

    def finalize(self) -> None:
        self._threads.shutdown()
        self._renderer.close()

    def _respond(self, request: Any, sender: Any) -> None:
        sender.send(self._answer(request), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any) -> Any:
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            ids, text = self._convert(tensors)
            outputs = [pb.Tensor(protocol.INPUT_IDS, np.array(ids, dtype=np.int32))]
            if protocol.TEXT_OUTPUT in request.requested_output_names():
                value = self._tokenizer.decode(ids) if text is None else text
                outputs.append(pb.Tensor(protocol.TEXT_OUTPUT, np.array([value.encode("utf-8")], dtype=np.object_)))
            return pb.InferenceResponse(output_tensors=outputs)
        except RequestError as error:
            return pb.InferenceResponse(output_tensors=[], error=pb.TritonError(error.message, _code(error)))
        except Exception:
            sentence = unexpected(logger)
            return pb.InferenceResponse(output_tensors=[], error=pb.TritonError(sentence, pb.TritonError.INTERNAL))

    def _convert(self, tensors: Mapping[str, Any]) -> tuple[list[int], str | None]:
        """(token ids, their text), whichever of the three inputs was sent."""
        text = decode.one_text(tensors, protocol.TEXT_INPUT)
        messages = decode.one_text(tensors, protocol.MESSAGES)
        ids = decode.token_ids(tensors, protocol.TOKEN_IDS)
        if (text is None) + (messages is None) + (ids is None) != 2:
            raise RequestError("send exactly one of text_input, messages and token_ids")
        if text is not None:
            special = tensors.get(protocol.ADD_SPECIAL_TOKENS)
            return self._tokenizer.encode(text, add_special_tokens=special is None or bool(special.flat[0])), None
        if messages is not None:
            prompt = self._renderer.render(messages, decode.one_text(tensors, protocol.TEMPLATE_PARAMETERS))
            return self._tokenizer.encode(prompt, add_special_tokens=False), prompt
        assert ids is not None
        skip = tensors.get(protocol.SKIP_SPECIAL_TOKENS)
        return ids, self._tokenizer.decode(ids, skip_special_tokens=skip is None or bool(skip.flat[0]))


def _code(error: RequestError) -> Any:
    """Triton's code of an error; the backend's module has them only once it runs a model."""
    codes = {
        ErrorCode.UNSUPPORTED: pb.TritonError.UNSUPPORTED,
        ErrorCode.UNAVAILABLE: pb.TritonError.UNAVAILABLE,
        ErrorCode.INTERNAL: pb.TritonError.INTERNAL,
    }
    return codes.get(error.code, pb.TritonError.INVALID_ARG)
