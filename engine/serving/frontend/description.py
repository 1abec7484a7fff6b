"""What a model says of itself to a client that asks: how it was made to be used."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.serving.frontend import sampling_fields
from engine.serving.frontend.settings import ModelSettings
from engine.text import TemplateMarks, read_templates, template_marks
from engine.text.checkpoint_files import read_json_object
from engine.types import RequestError

logger = logging.getLogger("nereid.frontend")

# generation_config.json's names of sampling fields, those that vLLM's server reads
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def description(settings: ModelSettings) -> dict[str, Any]:
    """The marks of its chat template, its own sampling and its other names."""
    return {
        "template": asdict(_marks(settings)),
        "sampling": sampling(settings.tokenizer),
        "served_names": list(settings.frontend.served_names),
    }


def _marks(settings: ModelSettings) -> TemplateMarks:
    """None where the template cannot be read: the model serves text, and its renderer says what is wrong."""
    try:
        return template_marks(read_templates(settings.tokenizer, settings.frontend.chat_template))
    except RequestError:
        return TemplateMarks()


def sampling(folder: Path) -> dict[str, Any]:
    """Sampling fields that a checkpoint's generation_config.json names. A value that no request could send is left out,
    with a line in the log."""
    found: dict[str, Any] = {}
    config = _generation_config(folder)
    for name, field in _SAMPLING.items():
        value = config.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        try:
            sampling_fields.build({field: value})
        except RequestError as error:
            logger.warning("generation_config.json of %s: %s; it is left out", folder, error)
        else:
            found[field] = value
    return found


def min_tokens(folder: Path) -> int:
    """No answer is shorter, as transformers generates by generation_config.json's `min_new_tokens`."""
    least = _generation_config(folder).get("min_new_tokens")
    return max(0, least) if isinstance(least, int) and not isinstance(least, bool) else 0


def _generation_config(folder: Path) -> dict[str, Any]:
    """Empty where there is none that can be read, which the log says."""
    try:
        return read_json_object(folder / "generation_config.json")
    except RequestError as error:
        logger.warning("%s: no sampling is taken from it", error)
        return {}
