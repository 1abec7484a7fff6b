"""Text of others for a terminal or a log: characters that would act there, and not show, are written as escapes.

Names and error texts quote what a checkpoint, a template, a configuration or a server says. A terminal obeys escape
sequences in them, and a line feed in a log begins a line that nobody wrote.
"""

from __future__ import annotations

import logging
import re

# Controls but tab and line feed, separators of lines, marks that turn the order of characters round (Unicode's
# Bidi_Control but for the two marks of a direction), and halves of surrogate pairs, which UTF-8 cannot carry.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """`text` with what acts on a terminal as `\\x1b` or `\\u202e`. Tabs and line feeds stay."""
    return _ACTS.sub(_escaped, text)


def line(text: str) -> str:
    """`text` on one line of a log, however many it has."""
    return plain(text).replace("\n", "\\n")


def log_to_stderr(layout: str, level: int | str = logging.INFO) -> None:
    """Have this process log to standard error, a line a record; nothing where it logs already.

    layout: of a record, as logging.Formatter takes it.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(layout))
    logging.basicConfig(level=level, handlers=[handler])


class LineFormatter(logging.Formatter):
    """Each record is one plain line; a traceback follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n")

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))


def _escaped(found: re.Match[str]) -> str:
    return ascii(found[0])[1:-1]
