"""Threads on which the matchers of a step take its tokens, and on which the masks of the next are made.

All matchers of a step go to llguidance in one call, which gives the interpreter's lock back: a call each would have
its threads and the engine's wait for that lock. Such a call says nothing of who took how long. It bounds what each took
though: where it takes less than a token gives back, so has everyone. A step that took longer is followed by one in
which each is timed, and that by others while one takes more than a token gives back; else by STEPS_UNTIMED without.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from engine.structured.matcher import ALLOWED_S, ALLOWED_TOKEN_S, GrammarMatcher

Masks = npt.NDArray[np.int32]
Item = TypeVar("Item")

_ALL = -1
STEPS_UNTIMED = 8
# Threads that matchers of a step take at most, of half of this process's cores: frontends want the others.
MAX_THREADS = 8


def usual_threads() -> int:
    """How many matchers of a step are at work at once."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))


class MatcherThreads:
    """Matchers of one vocabulary, a step's at once. One step is under way at a time.

    size: of the vocabulary. An answer may end by any of eos_ids. num_threads: `usual_threads` when None.
    """

    def __init__(self, size: int, eos_ids: frozenset[int], num_threads: int | None = None) -> None:
        self.words = -(-size // 32)
        self._eos_ids = eos_ids
        self._num_threads = num_threads or usual_threads()
        self._executor = LLExecutor(self._num_threads)
        # One more, which waits for the others.
        self._pool = ThreadPoolExecutor(self._num_threads + 1, "nereid-masks")
        self._timed, self._untimed = False, 0
        self._together_s, self._longest_s = 0.0, 0.0  # of the step under way: calls for all, the longest of one
        ending = np.zeros(self.words, np.uint32)
        for token in eos_ids:
            ending[token // 32] |= np.uint32(1 << token % 32)
        self._unended = (~ending).view(np.int32)
        self._ending_words = [(int(word), int(ending[word])) for word in np.flatnonzero(ending)]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def advance(self, matchers: Sequence[GrammarMatcher], runs: Sequence[Sequence[int]]) -> list[int]:
        """Give each its tokens: how many it took, all or up to the one that completes its answer."""
        taken = [0] * len(runs)
        going = [i for i, run in enumerate(runs) if run]
        while going:
            self._advance_each([(matchers[i], runs[i][taken[i]]) for i in going])
            for i in going:
                taken[i] += 1
            going = [i for i in going if taken[i] < len(runs[i]) and not matchers[i].ended]
        return taken

    def _advance_each(self, given: Sequence[tuple[GrammarMatcher, int]]) -> None:
        if self._timed or len(given) == 1:
            self._advance_timed(given)
            return
        thinking, going, asked = [], [], []
        for of, token in given:
            if of.budget is not None:
                thinking.append((of, token))
            elif of.begin(token) and of.inner is not None:
                going.append(of)
                asked.append((of.inner, token))
        if going:
            began = time.monotonic()
            consumed = consume_token_par(self._executor, asked)
            took = time.monotonic() - began
            self._together_s += took
            back = min(0.0, took - ALLOWED_TOKEN_S)
            for of, one in zip(going, consumed, strict=True):
                of.finish(one)
                if of.allowance.left < ALLOWED_S:
                    of.took(back)
        if thinking:
            self._advance_timed(thinking)

    def _advance_timed(self, given: Sequence[tuple[GrammarMatcher, int]]) -> None:
        going = [(of, token) for of, token in given if not of.ended and of.error is None]
        for of, token in given:
            if of.ended or of.error is not None:
                of.take(token)
        for (of, _), spent in zip(going, self._each(_take, going), strict=True):
            of.took(spent - ALLOWED_TOKEN_S)

    def start(self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]], masks: Masks) -> Future[None]:
        """`fill`, on another thread, which is at it when this returns."""
        rows = self._rows(matchers, drafts, masks)
        begun = threading.Lock()
        begun.acquire()
        made = self._pool.submit(self._fill_begun, begun, matchers, drafts, rows, masks)
        # That thread needs the interpreter's lock once more, and who goes on at once keeps it for milliseconds.
        begun.acquire()
        return made

    def fill(self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]], masks: Masks) -> None:
        """Write masks [n, words] int32, as `Vocabulary.masks` has them."""
        self._fill(matchers, drafts, self._rows(matchers, drafts, masks), masks)

    def _fill_begun(self, begun: threading.Lock, *arguments: Any) -> None:
        begun.release()
        self._fill(*arguments)

    def _rows(self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]], masks: Masks) -> Sequence[int]:
        """Where each matcher's masks begin; of answers that no grammar holds now they are written."""
        counts = [1 + len(tokens) for tokens in drafts]
        rows = [end - count for end, count in zip(accumulate(counts), counts, strict=True)] or range(len(matchers))
        for row, of in zip(rows, matchers, strict=True):
            if not of.held:
                cut = not of.ended and of.error is None and of.count < of.free_until
                masks[row] = self._unended if cut else _ALL
        return rows

    def _fill(
        self,
        matchers: Sequence[GrammarMatcher],
        drafts: Sequence[Sequence[int]],
        rows: Sequence[int],
        masks: Masks,
    ) -> None:
        going = [
            (of.inner, row, of) for row, of in zip(rows, matchers, strict=True) if of.held and of.inner is not None
        ]
        self._fill_each(going, masks)
        for inner, row, of in going:
            if inner.is_error():
                of.at_limit(inner.get_error())
                masks[row] = _ALL
            elif of.count < of.free_until:
                self._leave_no_end(masks[row])
        if drafts:
            self._look_ahead(list(zip(matchers, drafts, rows, strict=True)), masks)
        self._end_step()

    def _fill_each(self, going: Sequence[tuple[LLMatcher, int, GrammarMatcher]], masks: Masks) -> None:
        if self._timed or len(going) == 1:
            spent = self._each(lambda one: fill_next_token_bitmask(one[0], masks, one[1]), going)
            for (_, _, of), seconds in zip(going, spent, strict=True):
                of.took(seconds)
        elif going:
            began = time.monotonic()
            fill_next_token_bitmask_par(self._executor, [(inner, row) for inner, row, _ in going], masks)
            self._together_s += time.monotonic() - began

    def _look_ahead(self, drafted: Sequence[tuple[GrammarMatcher, Sequence[int], int]], masks: Masks) -> None:
        """Behind each of the drafted tokens, up to the first that may not stand: nothing behind it is read."""
        going = []
        for of, tokens, row in drafted:
            masks[row + 1 : row + 1 + len(tokens)] = _ALL
            if tokens and of.looks_ahead and of.held:
                going.append((of, tokens, row))
        for (of, _, _), spent in zip(going, self._each(lambda one: self._look_behind(*one, masks), going), strict=True):
            of.took(spent)

    def _look_behind(self, matcher: GrammarMatcher, tokens: Sequence[int], row: int, masks: Masks) -> None:
        assert matcher.inner is not None
        inner = matcher.inner.deep_copy()
        for i, token in enumerate(tokens, 1):
            if token in self._eos_ids or inner.try_consume_tokens([token]) != 1 or inner.is_stopped():
                return
            fill_next_token_bitmask(inner, masks, row + i)
            if inner.is_error():
                masks[row + i] = _ALL
                return
            if matcher.count + i < matcher.free_until:
                self._leave_no_end(masks[row + i])

    def _leave_no_end(self, mask: Masks) -> None:
        """No end of sequence, unless nothing else may follow."""
        if any(int(mask[word]) & bits for word, bits in self._ending_words):
            without = mask & self._unended
            if without.any():
                mask[:] = without

    def _each(self, what: Callable[[Item], None], items: Sequence[Item]) -> list[float]:
        """Do something with each, side by side: processor seconds of each."""
        # A thread each for as many runs of them; one alone needs no other thread.
        runs = [items[i :: self._num_threads] for i in range(min(self._num_threads, len(items)))]
        took = [0.0] * len(items)
        if len(runs) == 1:
            took = _timed(what, runs[0])
        else:
            for i, seconds in enumerate(self._pool.map(_timed, [what] * len(runs), runs)):
                took[i :: self._num_threads] = seconds
        self._longest_s = max(self._longest_s, *took, 0.0)
        return took

    def _end_step(self) -> None:
        if self._timed:
            self._timed, self._untimed = self._longest_s > ALLOWED_TOKEN_S, STEPS_UNTIMED
        else:
            self._untimed -= 1
            self._timed = self._untimed <= 0 and self._together_s > ALLOWED_TOKEN_S
        self._together_s = self._longest_s = 0.0


def _timed(what: Callable[[Item], None], items: Sequence[Item]) -> list[float]:
    took = []
    for item in items:
        began = time.thread_time()
        what(item)
        took.append(time.thread_time() - began)
    return took


def _take(given: tuple[GrammarMatcher, int]) -> None:
    matcher, token = given
    matcher.take(token)
