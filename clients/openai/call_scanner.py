"""One tool call out of JSON that is still being written."""

from __future__ import annotations

import json


class CallScanner:
    """Reads one call object, `{"name": string, "arguments" or "parameters": value}`, a piece of text at a time.

    `raw` is everything taken so far. `bad` is set at the first character that cannot stand where it does; inside of
    the arguments that is only a `<` outside of a string: a tag, where the model forgot a bracket. `rest` is what
    follows the object once `done`, and what begins with that character once `bad`. Of a key that occurs twice the
    first counts.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.bad = False
        self.raw = ""
        self.rest = ""
        self._state = "start"
        self._key = ""
        self._token = ""  # the string or literal being read
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._arguments = ""  # not handed out yet
        self._has_arguments = False
        self._in_arguments = False
        self._quoted = False

    @classmethod
    def inside_arguments(cls, name: str) -> CallScanner:
        """A scanner for a call whose text up to and including the arguments' `{` was given to the model."""
        scanner = cls()
        scanner.name, scanner._state, scanner._in_arguments = name, "value", True
        scanner._depth, scanner._arguments, scanner._has_arguments = 1, "{", True
        return scanner

    def feed(self, text: str) -> None:
        for position, char in enumerate(text):
            self._step(char)
            if self.done or self.bad:
                taken = position + self.done
                self.raw += text[:taken]
                self.rest = text[taken:]
                return
        self.raw += text

    def take_arguments(self) -> str:
        """Argument text since the last call; empty until the name is known."""
        if self.name is None or self._quoted:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    @property
    def arguments_complete(self) -> bool:
        return self._has_arguments and self._state in ("after", "end")

    def _step(self, char: str) -> None:
        if self._state == "value":
            self._in_value(char)
        elif self._state == "key":
            self._in_key(char)
        elif char.isspace():
            return
        elif self._state == "start":
            self._expect(char, "{", "first")
        elif self._state == "colon":
            self._expect(char, ":", "before")
        elif self._state == "before":
            self._open_value(char)
        elif self._state in ("first", "next") and char == '"':
            self._state, self._token, self._escaped = "key", '"', False
        elif self._state == "after" and char == ",":
            self._state = "next"
        elif self._state in ("first", "after") and char == "}":
            self._close()
        else:
            self.bad = True

    def _expect(self, char: str, wanted: str, state: str) -> None:
        if char == wanted:
            self._state = state
        else:
            self.bad = True

    def _in_key(self, char: str) -> None:
        self._token += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._key = self._decoded(self._token)
            self._state = "colon"

    def _open_value(self, char: str) -> None:
        if char not in '"{[-tfn' and not char.isdigit():
            self.bad = True
            return
        self._state, self._token, self._depth, self._in_string, self._escaped = "value", "", 0, False, False
        self._in_arguments = self._key in ("arguments", "parameters") and not self._has_arguments
        if self._in_arguments:
            self._has_arguments = True
            self._quoted = char == '"'
        self._in_value(char)

    def _in_value(self, char: str) -> None:
        if char == "<" and not self._in_string:
            self.bad = True
            return
        if not self._in_string and self._depth == 0 and self._token and char in ",}] \n\t\r":
            self._end_value()  # a number, true, false or null ends where something else begins
            if not self.bad and not char.isspace():
                self._step(char)
            return
        self._put(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 0:
                    self._end_value()
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value()

    def _put(self, char: str) -> None:
        if self._in_arguments:
            self._arguments += char
        if self._depth == 0 or self._key == "name":
            self._token += char

    def _end_value(self) -> None:
        self._state = "after"
        if self._key == "name" and self.name is None:
            self.name = self._decoded(self._token) or None
            self.bad = self.name is None
        elif self._in_arguments and self._quoted:
            self._arguments, self._quoted = self._decoded(self._arguments), False

    def _close(self) -> None:
        if self.name is None:
            self.bad = True
            return
        if not self._has_arguments:
            self._arguments = "{}"
        self._state, self.done = "end", True

    def _decoded(self, text: str) -> str:
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.bad = True
            return ""
        return value
