"""A tokenizer's tokens as llguidance takes them, and what is made over them: matchers and masks."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from engine.structured import constraint_grammar
from engine.structured.lark_rules import SpecialTokens
from engine.structured.matcher import ALLOWED_TOKEN_S, GrammarMatcher, ThinkingBudget
from engine.text import Tokenizer
from engine.types import Constraint, ErrorCode, RequestError

Masks = npt.NDArray[np.int32]

_ALL = -1
# What llguidance says of a grammar that has no first token.
_NO_TOKEN = "NoExtensionBias"
# 50,000 states take 65 MB, and so many grammars are kept. A mask's time grows faster than its items: 20,000 take 50 ms,
# 50,000 half a second, and no published schema needs 5,000 (docs/experiments/2026-11-24-hostile-grammars-and-texts.md).
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000, step_max_items=20_000, max_items_in_row=1_000)
# A step whose masks took SLOW_S is followed by one in which each is timed, and that by others while one takes more than
# a token gives back; else by STEPS_UNTIMED without, which spares Python a loop over them.
SLOW_S = 0.02
STEPS_UNTIMED = 8


# Threads that masks of a step take at most, of half of the machine's: frontends want the others.
MAX_THREADS = 8


def _timed_masks(run: Sequence[tuple[LLMatcher, int, GrammarMatcher]], masks: Masks) -> list[float]:
    """Fill the rows of some masks; processor seconds of each."""
    took = []
    for inner, row, _ in run:
        began = time.thread_time()
        fill_next_token_bitmask(inner, masks, row)
        took.append(time.thread_time() - began)
    return took


class Vocabulary:
    """One tokenizer's tokens. Safe to share between threads.

    folder: the checkpoint's. vocab_size: logits of the model, more than tokens or fewer. An answer may end by any of
    eos_ids. Raises RequestError when there is no tokenizer, or tokens have no bytes of their own.
    """

    def __init__(self, folder: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        tokenizer = Tokenizer.from_folder(folder)
        if not tokenizer.byte_exact:
            raise RequestError(
                "structured_outputs needs tokens that stand for bytes, and this model's tokenizer has others: leave "
                "it out",
                ErrorCode.UNSUPPORTED,
            )
        # A model without an end of sequence gets one that no logit is for.
        self._eos = frozenset(eos_ids) or frozenset((vocab_size,))
        self._size = vocab_size + (not eos_ids)
        # A tokenizer may have tokens that the model has no logit for, as for a picture.
        special = (i for i in tokenizer.special_ids if i < self._size)
        self._special = SpecialTokens({tokenizer.token_text(i): i for i in special}, self._eos)
        tokens = cast(TokenizerWrapper, _Tokens(tokenizer, self._size, min(self._eos)))
        self._tokens = LLTokenizer(tokens, self._size, sorted(self._eos))
        self._num_threads = max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2))
        self._executor = LLExecutor(self._num_threads)
        self._pool = ThreadPoolExecutor(self._num_threads, "nereid-masks")
        self._timed = False
        self._untimed = 0
        self._ending = np.zeros(-(-self._size // 32), np.uint32)
        for token in self._eos:
            self._ending[token // 32] |= np.uint32(1 << token % 32)

    def compiled(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher at the beginning of its answer. Raises RequestError with what is wrong with the constraint."""
        special, budget = self._special, None
        if constraint.think_tokens is not None:
            budget = ThinkingBudget(
                self._matcher(constraint_grammar.opening(constraint, special), constraint)
                if constraint.think == "may"
                else None,
                self._matcher(constraint_grammar.thinking(constraint, special), constraint),
                self._matcher(constraint_grammar.closing(constraint, special), constraint),
                constraint.think_tokens,
            )
        if constraint.kind == "free":
            return GrammarMatcher(None, self._eos, 0, budget, free=True)
        return GrammarMatcher(
            self._matcher(constraint_grammar.grammar(constraint, special), constraint, constraint.prefix),
            self._eos,
            0,
            budget,
        )

    def _matcher(self, text: str, constraint: Constraint, prefix: str = "") -> LLMatcher:
        inner = LLMatcher(self._tokens, text, log_level=0, limits=_LIMITS)
        if not inner.is_error() and prefix:
            for piece in self._special.split(prefix):
                inner.consume_tokens([piece] if isinstance(piece, int) else self._tokens.greedy_tokenize(piece))
        if not inner.is_error():
            inner.compute_bitmask()  # the first takes longest: not on the engine's thread
        if inner.is_error():
            told = " ".join(inner.get_error().split())
            if told.startswith(_NO_TOKEN):
                told = "no text satisfies it"
            raise RequestError(f"structured_outputs: this {constraint.kind} cannot be used: {told}")
        return inner

    def begun(self, first: GrammarMatcher, free_until: int, tokens: Sequence[int]) -> GrammarMatcher:
        """A copy of `first` behind the tokens that an earlier life of its request gave."""
        matcher = first.copy(free_until)
        for token in tokens:
            matcher.advance(token)
        if matcher.error is not None:
            raise RequestError(f"output_ids: {matcher.error}")
        return matcher

    def masks(self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] = ()) -> Masks:
        """[n, words] int32: bit v % 32 of word v // 32 says whether token v may follow. drafts: of each matcher, tokens
        behind which it is said as well, in as many rows behind its own."""
        counts = [1 + len(tokens) for tokens in drafts] or [1] * len(matchers)
        rows = [end - count for end, count in zip(itertools.accumulate(counts), counts, strict=True)]
        masks = np.full((sum(counts), len(self._ending)), _ALL, np.int32)
        open_ = []
        for row, of in zip(rows, matchers, strict=True):
            if of.ended or of.error is not None:
                continue
            if of.inner is not None:
                open_.append((of.inner, row, of))
            elif of.count < of.free_until:
                masks[row] = (~self._ending).view(np.int32)
        if len(open_) == 1 or self._timed:
            self._fill_timed(open_, masks)
        elif open_:
            began = time.monotonic()
            fill_next_token_bitmask_par(self._executor, [(inner, row) for inner, row, _ in open_], masks)
            self._untimed -= 1
            self._timed = self._untimed <= 0 and time.monotonic() - began > SLOW_S
        for inner, row, matcher in open_:
            if inner.is_error():
                matcher.at_limit(inner.get_error())
            elif matcher.count < matcher.free_until:
                self._unended(masks, row)
        for row, of, tokens in zip(rows, matchers, drafts or ((),) * len(matchers), strict=True):
            if tokens and of.looks_ahead and not of.ended and of.error is None:
                self._look_ahead(of, tokens, masks, row + 1)
        return masks

    def _fill_timed(self, open_: Sequence[tuple[LLMatcher, int, GrammarMatcher]], masks: Masks) -> None:
        """Each on its own account, on whichever thread: only so is it known whose masks take long."""
        # A thread each for as many runs of them; one mask needs no other thread.
        runs = [open_[i :: self._num_threads] for i in range(min(self._num_threads, len(open_)))]
        took: Iterable[list[float]] = (
            [_timed_masks(runs[0], masks)]
            if len(runs) == 1
            else self._pool.map(_timed_masks, runs, [masks] * len(runs))
        )
        longest = 0.0
        for run, seconds in zip(runs, took, strict=True):
            for (_, _, of), spent in zip(run, seconds, strict=True):
                of.took(spent)
                longest = max(longest, spent)
        self._timed, self._untimed = longest > ALLOWED_TOKEN_S, STEPS_UNTIMED

    def _look_ahead(self, matcher: GrammarMatcher, tokens: Sequence[int], masks: Masks, row: int) -> None:
        """Behind each of `tokens`, up to the first that may not stand: nothing behind it is read."""
        assert matcher.inner is not None
        began = time.thread_time()
        self._look_behind(matcher, matcher.inner.deep_copy(), tokens, masks, row)
        matcher.took(time.thread_time() - began)

    def _look_behind(
        self, matcher: GrammarMatcher, inner: LLMatcher, tokens: Sequence[int], masks: Masks, row: int
    ) -> None:
        for i, token in enumerate(tokens):
            if token in self._eos or inner.try_consume_tokens([token]) != 1 or inner.is_stopped():
                return
            fill_next_token_bitmask(inner, masks, row + i)
            if inner.is_error():
                return
            if matcher.count + 1 + i < matcher.free_until:
                self._unended(masks, row + i)

    def _unended(self, masks: Masks, row: int) -> None:
        """No end of sequence, unless nothing else may follow."""
        without = masks[row].view(np.uint32) & ~self._ending
        if without.any():
            masks[row] = without.view(np.int32)


class _Tokens:
    """What llguidance reads of a tokenizer, under its names."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, size: int, eos_id: int) -> None:
        self.tokens = [tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < size)
        self.eos_token_id = eos_id
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
