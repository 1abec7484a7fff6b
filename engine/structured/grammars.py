"""Constraints compiled on threads of their own, kept for those who send them again, and the masks of a step.

A request waits for its own grammar alone. What compiling and masks may take is bounded by llguidance's own limits on
work and size, and by a time after which the request is refused and the thread that is busy with it is replaced.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, cast

from engine.core.request import Matcher
from engine.types import Constraint, ErrorCode, RequestError, RequestInput, shown

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from engine.structured.matcher import GrammarMatcher
    from engine.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

WORKERS = 2
MAX_STUCK = 8  # threads that are past their time and not back yet
COMPILE_S = 10.0
MAX_KEPT = 64

Ready = Callable[["Matcher | RequestError"], None]


class _Job:
    """A request that waits for its matcher; `ready` is called once."""

    def __init__(self, input: RequestInput, ready: Ready) -> None:
        self.input = input
        self._ready: Ready | None = ready
        self._lock = threading.Lock()

    def resolve(self, matcher: Matcher | RequestError) -> None:
        with self._lock:
            ready, self._ready = self._ready, None
        if ready is not None:
            ready(matcher)


class Grammars:
    """What holds answers to their constraints, for one engine. Safe to use from any thread.

    folder: of the tokenizer. Nothing is read before the first constraint comes.
    """

    def __init__(
        self, folder: str, vocab_size: int, eos_ids: Sequence[int], compile_s: float = COMPILE_S, workers: int = WORKERS
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._compile_s = compile_s
        self._num_workers = workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._kept: OrderedDict[Constraint, GrammarMatcher] = OrderedDict()
        self._running = 0
        self._stuck = 0

    def make(self, input: RequestInput, ready: Ready) -> None:
        """Make the matcher of a request that has a constraint, behind the tokens that it was given already. `ready`
        gets it, or the reason why there is none, on another thread or on this one."""
        job = _Job(input, ready)
        with self._lock:
            if self._stuck >= MAX_STUCK:
                refusal = "structured_outputs: grammars take too long to compile at the moment; try again later"
                job.resolve(RequestError(refusal, ErrorCode.UNAVAILABLE))
                return
            while self._running < self._num_workers:
                self._start()
        self._jobs.put(job)

    @property
    def mask_words(self) -> int:
        return self._vocabulary.mask_words

    def advance(self, matchers: Sequence[Matcher], runs: Sequence[Sequence[int]]) -> list[int]:
        """As `engine.core.request.Matchers` has it."""
        return self._vocabulary.advance(cast("Sequence[GrammarMatcher]", matchers), runs)

    def start_masks(
        self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]], masks: npt.NDArray[np.int32]
    ) -> Future[None]:
        """As `engine.core.request.Matchers` has it."""
        return self._vocabulary.start_masks(cast("Sequence[GrammarMatcher]", matchers), drafts, masks)

    def masks(self, matchers: Sequence[Matcher], drafts: Sequence[Sequence[int]] = ()) -> npt.NDArray[np.int32]:
        """What each may draw next, and behind each of its drafts, [n, words] int32, one bit a token. A matcher that
        fails has an error afterwards."""
        return self._vocabulary.masks(cast("Sequence[GrammarMatcher]", matchers), drafts)

    def close(self) -> None:
        """End the threads that are not busy; those that compile end with what they do."""
        for _ in range(self._num_workers):
            self._jobs.put(None)
        if "_vocabulary" in self.__dict__:
            self._vocabulary.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        from engine.structured.vocabulary import Vocabulary

        return Vocabulary(self._folder, self._vocab_size, self._eos_ids)

    def _start(self) -> None:
        self._running += 1
        threading.Thread(target=self._work, name="nereid-grammar", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            late = threading.Event()
            timer = threading.Timer(self._compile_s, self._give_up, (job, late))
            timer.daemon = True
            timer.start()
            try:
                made: Matcher | RequestError = self._made(job.input)
            except RequestError as error:
                made = error
            except Exception as error:
                logger.exception("a constraint could not be compiled")
                made = RequestError(f"structured_outputs: the grammar cannot be compiled: {shown(str(error))}")
            timer.cancel()
            job.resolve(made)
            with self._lock:
                if late.is_set():
                    self._stuck -= 1
                    return
        with self._lock:
            self._running -= 1

    def _give_up(self, job: _Job, late: threading.Event) -> None:
        with self._lock:
            late.set()
            self._stuck += 1
            self._running -= 1
            self._start()
        job.resolve(
            RequestError(
                f"structured_outputs: the grammar takes more than {self._compile_s:g} s to compile: make it simpler"
            )
        )

    def _made(self, input: RequestInput) -> Matcher:
        constraint = input.params.structured_outputs
        assert constraint is not None
        with self._lock:
            first = self._kept.get(constraint)
            if first is not None:
                self._kept.move_to_end(constraint)
        if first is None or first.allowance.gone:
            first = self._vocabulary.compiled(constraint)
            with self._lock:
                for gone in [other for other, kept in self._kept.items() if kept.allowance.gone]:
                    del self._kept[gone]
                self._kept[constraint] = first
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        params = input.params
        free_until = params.max_tokens if params.ignore_eos else params.min_tokens
        return self._vocabulary.begun(first, free_until, input.output_ids)
