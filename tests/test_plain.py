"""Nothing that others wrote acts on a terminal, or begins a line in a log."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path

import pytest
from rich.table import Table

from engine.plain import LineFormatter, line, plain
from engine.terminal import Console

SOURCES = Path(__file__).parents[1]
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eb\ud800"
SHOWN = r"a\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202eb\ud800"


def test_what_acts_is_written_as_escapes_and_all_else_as_it_is() -> None:
    assert plain(HOSTILE) == SHOWN
    assert plain("two\tlines\nof text, größe, עברית, 👩‍💻") == "two\tlines\nof text, größe, עברית, 👩‍💻"


def test_a_sentence_in_a_log_is_one_line() -> None:
    assert line(f"{HOSTILE}\nERROR: forged") == f"{SHOWN}\\nERROR: forged"


def test_a_console_prints_plain_strings_in_tables_too_and_keeps_its_own_styles() -> None:
    to = io.StringIO()
    console = Console(file=to, force_terminal=True, color_system="standard", width=200)
    console.print(f"[red]error:[/] {HOSTILE}", highlight=False)
    table = Table("head")
    table.add_row(HOSTILE)
    console.print(table)
    written = to.getvalue()
    assert written.startswith("\x1b[31merror:\x1b[0m ")
    assert set(re.findall(r"\x1b[^m]*m?", written)) <= {"\x1b[31m", "\x1b[0m", "\x1b[1m"}
    assert written.count(SHOWN) == 2


def test_a_record_is_one_line_and_its_traceback_follows_plainly() -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError as error:
        record = logging.LogRecord(
            "x", logging.INFO, "", 0, "%s\nERROR: forged", (HOSTILE,), (type(error), error, None)
        )
    first, *behind = LineFormatter("nereid demo: %(message)s").format(record).splitlines()
    assert first == f"nereid demo: {SHOWN}\\nERROR: forged"
    assert behind[-1] == f"ValueError: {SHOWN}"


@pytest.mark.parametrize("folder", ["engine", "clients"])
def test_no_command_has_another_console_or_log(folder: str) -> None:
    for file in (SOURCES / folder).rglob("*.py"):
        if file.name not in ("plain.py", "terminal.py"):
            assert not re.search(r"from rich.console import Console|logging\.basicConfig", file.read_text()), file
