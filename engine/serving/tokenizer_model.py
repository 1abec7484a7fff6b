"""The Python backend's model class of a tokenizer: text or chat messages to ids, ids to text."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from engine.serving import decode, protocol
from engine.serving.process_watch import die_with
from engine.serving.settings import SettingsError, checkpoint
from engine.text import ChatTemplate, Tokenizer
from engine.types import ErrorCode, RequestError

_RENDER_FIELDS = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})


class TritonPythonModel:
    """One instance; requests are answered in the order they come."""

    def initialize(self, args: dict[str, str]) -> None:
        die_with(os.getppid())
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        try:
            unknown = sorted(set(parameters) - {"model"})
            if unknown:
                raise SettingsError(f"config.pbtxt has an unknown parameter {unknown[0]!r}: known is 'model'")
            folder = checkpoint(parameters.get("model", ""), Path(args["model_repository"]))
            self._tokenizer = Tokenizer.from_folder(folder)
            self._template = ChatTemplate.from_folder(folder)
        except (SettingsError, RequestError) as error:
            raise pb.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            ids, text = self._convert(tensors)
        except RequestError as error:
            unsupported = error.code is ErrorCode.UNSUPPORTED
            code = pb.TritonError.UNSUPPORTED if unsupported else pb.TritonError.INVALID_ARG
            return pb.InferenceResponse(output_tensors=[], error=pb.TritonError(error.message, code))
        outputs = [pb.Tensor(protocol.INPUT_IDS, np.array(ids, dtype=np.int32))]
        if protocol.TEXT_OUTPUT in request.requested_output_names():
            value = self._tokenizer.decode(ids) if text is None else text
            outputs.append(pb.Tensor(protocol.TEXT_OUTPUT, np.array([value.encode("utf-8")], dtype=np.object_)))
        return pb.InferenceResponse(output_tensors=outputs)

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
            prompt = self._render(messages, decode.one_text(tensors, protocol.TEMPLATE_PARAMETERS))
            return self._tokenizer.encode(prompt, add_special_tokens=False), prompt
        assert ids is not None
        skip = tensors.get(protocol.SKIP_SPECIAL_TOKENS)
        return ids, self._tokenizer.decode(ids, skip_special_tokens=skip is None or bool(skip.flat[0]))

    def _render(self, messages: bytes, parameters: bytes | None) -> str:
        if self._template is None:
            raise RequestError("this checkpoint has no chat template: send text_input", ErrorCode.UNSUPPORTED)
        fields = _json(parameters, protocol.TEMPLATE_PARAMETERS, dict) if parameters is not None else {}
        known = {name: value for name, value in fields.items() if name in _RENDER_FIELDS}
        more = {name: value for name, value in fields.items() if name not in _RENDER_FIELDS}
        return self._template.render(_json(messages, protocol.MESSAGES, list), template_kwargs=more, **known)


def _json(raw: bytes, name: str, kind: type[Any]) -> Any:
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise RequestError(f"{name} must be a JSON {'list' if kind is list else 'object'}")
    return value
