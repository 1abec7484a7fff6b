"""Read the small JSON files of a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine import files
from engine.types import ErrorCode, RequestError

MAX_BYTES = 16 << 20  # of a small file: templates and settings have kilobytes


def checkpoint_folder(path: str | Path) -> Path:
    """The folder at `path`. Raises RequestError when there is none."""
    folder = Path(path)
    if not folder.is_dir():
        raise RequestError(
            f"{folder} is not a folder; give the path of a Hugging Face checkpoint folder", ErrorCode.NOT_FOUND
        )
    return folder


def read_text(file: Path) -> str:
    """The text in `file`. Raises RequestError when it is not a file of UTF-8 text of a size to be read whole."""
    try:
        return files.read(file, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"{file} is not valid UTF-8 at byte {error.start}") from error


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, or an empty one when the file is absent. Raises RequestError on anything else."""
    if not file.exists():
        return {}
    text = read_text(file)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(f"{file} must hold a JSON object, not {type(value).__name__}")
    return value


def token_string(value: Any) -> str | None:
    """The text of a special token as tokenizer_config.json writes it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
