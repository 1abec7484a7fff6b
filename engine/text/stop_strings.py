"""Find the first of several stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Matches all stop strings at once, one character after the other.

    The match that *ends* first wins; among matches that end together the longest one. That makes the result a
    property of the text alone, however it is cut into pieces.

    Each stop string is a Knuth-Morris-Pratt automaton (Knuth, Morris, Pratt 1977) whose failure table grows only as
    far as the text has matched it, so long stop strings cost nothing until they are nearly met, and only the automata
    with a live partial match are stepped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._fail: list[list[int]] = [[0] for _ in stops]  # _fail[i][k]: longest border of stops[i][:k + 1]
        self._starting: dict[str, list[int]] = {}
        for i, stop in enumerate(stops):
            self._starting.setdefault(stop[0], []).append(i)
        self._live: dict[int, int] = {}  # stop -> characters of it matched at the end of the text

    @property
    def held(self) -> int:
        """Characters at the end of the text that may yet become a stop string."""
        return max(self._live.values(), default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Read `text`; at the first match, (characters of `text` read up to its end, the stop string) and stop there.

        To go on behind a match, feed the rest of the text.
        """
        if not self._live and self._starting.keys().isdisjoint(text):
            return None
        for position, char in enumerate(text):
            found = self._step(char)
            if found is not None:
                return position + 1, found
        return None

    def _step(self, char: str) -> str | None:
        before = self._live
        starting = self._starting.get(char, ())
        if not before and not starting:
            return None
        self._live = live = {}
        found: str | None = None
        for i, matched in before.items():
            matched = self._advance(i, matched, char)
            if matched:
                live[i] = matched
        for i in starting:
            live.setdefault(i, 1)
        for i in [i for i, matched in live.items() if matched == len(self._stops[i])]:
            stop = self._stops[i]
            if found is None or len(stop) > len(found):
                found = stop
            border = self._border(i, len(stop))
            if border:
                live[i] = border
            else:
                del live[i]
        return found

    def _advance(self, i: int, matched: int, char: str) -> int:
        stop = self._stops[i]
        while matched and stop[matched] != char:
            matched = self._border(i, matched)
        return matched + 1 if stop[matched] == char else 0

    def _border(self, i: int, length: int) -> int:
        """Length of the longest proper prefix of stops[i][:length] that is also its suffix."""
        fail, stop = self._fail[i], self._stops[i]
        while len(fail) < length:
            k = fail[-1]
            char = stop[len(fail)]
            while k and stop[k] != char:
                k = fail[k - 1]
            fail.append(k + 1 if stop[k] == char else 0)
        return fail[length - 1]
