"""The Python backend's model class of a tokenizer: text or chat messages to ids, ids to text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engine.serving.frontend import request_tensors
from engine.serving.frontend.renderer import Renderer
from engine.serving.frontend.text_model import TextModel
from engine.serving.link import protocol
from engine.types import RequestError

# What each further tensor says something of, and its values that ask for nothing.
_FOR: dict[str, tuple[str, tuple[Any, ...]]] = {
    protocol.ADD_SPECIAL_TOKENS: (protocol.TEXT_INPUT, (True,)),
    protocol.TEMPLATE_PARAMETERS: (protocol.MESSAGES, (b"", b"{}", "", "{}")),
    protocol.SKIP_SPECIAL_TOKENS: (protocol.TOKEN_IDS, (True,)),
}


class TritonPythonModel(TextModel):
    """Takes one of a text, chat messages and token ids."""

    parameters = ("chat_template",)

    def finalize(self) -> None:
        super().finalize()
        self._renderer.close()

    def _open(self, folder: Path) -> None:
        self._renderer = Renderer(folder, file=self._template)

    def _outputs(self, tensors: Mapping[str, Any], wanted: frozenset[str], context: int) -> Mapping[str, Any]:
        ids, text = self._convert(tensors, context)
        found = {protocol.INPUT_IDS: np.array(ids, dtype=np.int32)}
        if protocol.TEXT_OUTPUT in wanted:
            value = self._tokenizer.decode(ids) if text is None else text
            found[protocol.TEXT_OUTPUT] = np.array([value.encode("utf-8")], dtype=np.object_)
        return found

    def _convert(self, tensors: Mapping[str, Any], context: int) -> tuple[list[int], str | None]:
        """(token ids, their text), whichever of the three inputs was sent."""
        text = request_tensors.one_text(tensors, protocol.TEXT_INPUT)
        messages = request_tensors.one_text(tensors, protocol.MESSAGES)
        ids = request_tensors.token_ids(tensors, protocol.TOKEN_IDS)
        if (text is None) + (messages is None) + (ids is None) != 2:
            raise RequestError("send exactly one of text_input, messages and token_ids")
        for name, (source, neutral) in _FOR.items():
            if source not in tensors and name in tensors and any(value not in neutral for value in tensors[name].flat):
                raise RequestError(f"{name} goes with {source}, which is not there: leave {name} out")
        if text is not None:
            special = tensors.get(protocol.ADD_SPECIAL_TOKENS)
            return self._tokenizer.encode(text, add_special_tokens=special is None or bool(special.flat[0])), None
        if messages is not None:
            prompt = self._renderer.render(messages, request_tensors.one_text(tensors, protocol.TEMPLATE_PARAMETERS))
            self._tokenizer.check_length(len(prompt.encode("utf-8", "surrogatepass")), context)
            return self._tokenizer.encode(prompt, add_special_tokens=False), prompt
        assert ids is not None
        skip = tensors.get(protocol.SKIP_SPECIAL_TOKENS)
        return ids, self._tokenizer.decode(ids, skip_special_tokens=skip is None or bool(skip.flat[0]))
