"""The Python backend's model classes of TensorRT-LLM's `preprocessing` and `postprocessing`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.serving.frontend import tensorrt_llm
from engine.serving.frontend.text_model import TextModel
from engine.text.checkpoint_files import read_json_object, token_string


class Preprocessing(TextModel):
    """Texts to ids. OUT_END_ID and OUT_PAD_ID are the checkpoint's eos_token where the request names none."""

    def _open(self, folder: Path) -> None:
        token = token_string(read_json_object(folder / "tokenizer_config.json").get("eos_token"))
        ids = [] if token is None else self._tokenizer.encode(token, add_special_tokens=False)
        self._end_id = ids[0] if len(ids) == 1 else -1

    def _outputs(self, tensors: Mapping[str, Any], wanted: frozenset[str], context: int) -> Mapping[str, Any]:
        found = tensorrt_llm.preprocess(tensors, self._tokenizer, self._end_id)
        return {name: array for name, array in found.items() if name in wanted}


class Postprocessing(TextModel):
    """Ids to texts."""

    def _open(self, folder: Path) -> None:
        """Nothing but the tokenizer."""

    def _outputs(self, tensors: Mapping[str, Any], wanted: frozenset[str], context: int) -> Mapping[str, Any]:
        return {"OUTPUT": tensorrt_llm.postprocess(tensors, self._tokenizer)}
