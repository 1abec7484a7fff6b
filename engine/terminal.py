"""The console of the `nereid` commands: rich's, on which text of others shows and does nothing."""

from __future__ import annotations

import contextlib
from typing import IO, Any, cast

import rich.console
from rich.text import Text

from engine.plain import plain


class Console(rich.console.Console):
    """Every string that is printed, in a table too, is written plain; styles are the business of its markup.

    goes_on: what cannot be written (the disk is full, the other end of a pipe has gone) is lost, and is no error.
    """

    def __init__(self, *, goes_on: bool = False, **options: Any) -> None:
        self._goes_on = goes_on
        super().__init__(**options)

    @property
    def file(self) -> IO[str]:
        found: IO[str] = rich.console.Console.file.fget(self)  # type: ignore[attr-defined]
        return cast("IO[str]", _Lossy(found)) if self._goes_on else found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        rich.console.Console.file.fset(self, new_file)  # type: ignore[attr-defined]

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)


class _Lossy:
    """A file of which writes do not fail."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        encoding = getattr(self._file, "encoding", None) or "utf-8"
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._file.flush()
