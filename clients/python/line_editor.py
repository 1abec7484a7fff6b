"""What `nereid chat` reads at a terminal: a line to edit, lines of earlier sessions, several lines at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.filters import Condition
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output

_PROMPT = HTML("<b><ansicyan>&gt; </ansicyan></b>")
_CONTINUATION = "  "


def editor(
    file: Path, commands: Sequence[str], input: Input | None = None, output: Output | None = None
) -> Callable[[], str]:
    """A function that reads what the user types. Enter sends it; Alt-Enter, or a paste, makes a further line; arrows go
    through what was typed before, in earlier sessions too (`file`); Ctrl-R searches it; Tab completes `commands`.
    Ctrl-C takes back what was typed.

    It raises EOFError for Ctrl-D and KeyboardInterrupt for Ctrl-C on an empty line.
    """
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=Condition(lambda: bool(session.default_buffer.text)))
    def _take_back(event: KeyPressEvent) -> None:
        event.current_buffer.reset()

    session: PromptSession[str] = PromptSession(
        _PROMPT,
        multiline=True,
        prompt_continuation=_CONTINUATION,
        history=_history(file),
        key_bindings=keys,
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        enable_history_search=True,
        input=input,
        output=output,
    )
    return session.prompt


def _history(file: Path) -> History:
    """Kept in `file`, which its owner alone may read; where it cannot be written, in memory."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        with file.open("a"):
            return FileHistory(str(file))
    except OSError:
        return InMemoryHistory()
