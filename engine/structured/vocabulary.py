"""A tokenizer's tokens as llguidance takes them, and what is made over them: matchers and masks."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import cast

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.structured import constraint_grammar
from engine.structured.lark_rules import SpecialTokens
from engine.structured.limits import LIMITS, NOT_ALLOWED, plain
from engine.structured.matcher import GrammarMatcher, ThinkingBudget
from engine.structured.threads import Masks, MatcherThreads
from engine.text import Tokenizer
from engine.types import Constraint, ErrorCode, RequestError


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
        self._threads = MatcherThreads(self._size, self._eos)
        self.mask_words = self._threads.words

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
        inner = LLMatcher(self._tokens, text, log_level=0, limits=LIMITS)
        if not inner.is_error() and prefix:
            for piece in self._special.split(prefix):
                inner.consume_tokens([piece] if isinstance(piece, int) else self._tokens.greedy_tokenize(piece))
        if not inner.is_error():
            inner.compute_bitmask()  # the first takes longest: not on the engine's thread
        error = inner.get_error() or _behind_forced(inner)
        if error:
            raise RequestError(f"structured_outputs: this {constraint.kind} cannot be used: {plain(error)}")
        return inner

    def begun(self, first: GrammarMatcher, free_until: int, tokens: Sequence[int]) -> GrammarMatcher:
        """A copy of `first` behind the tokens that an earlier life of its request gave."""
        matcher = first.copy(free_until)
        for token in tokens:
            matcher.advance(token)
        if matcher.error is not None:
            raise RequestError(f"output_ids: {matcher.error}")
        return matcher

    def advance(self, matchers: Sequence[GrammarMatcher], runs: Sequence[Sequence[int]]) -> list[int]:
        """Give each its tokens: how many it took, all or up to the one that completes its answer."""
        return self._threads.advance(matchers, runs)

    def start_masks(
        self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]], masks: Masks
    ) -> Future[None]:
        """Write `masks` on another thread. Until that is done nothing else may be asked of the matchers."""
        return self._threads.start(matchers, drafts, masks)

    def masks(self, matchers: Sequence[GrammarMatcher], drafts: Sequence[Sequence[int]] = ()) -> Masks:
        """[n, words] int32: bit v % 32 of word v // 32 says whether token v may follow. drafts: of each matcher, tokens
        behind which it is said as well, in as many rows behind its own."""
        masks = np.empty((len(matchers) + sum(map(len, drafts)), self.mask_words), np.int32)
        self._threads.fill(matchers, drafts, masks)
        return masks

    def close(self) -> None:
        """End its threads."""
        self._threads.close()


def _behind_forced(inner: LLMatcher) -> str:
    """What is wrong behind the text that every answer begins with, or with that text; nothing mostly."""
    ahead = inner.deep_copy()
    forced = ahead.compute_ff_tokens()
    if forced and ahead.try_consume_tokens(forced) == len(forced) and not ahead.is_stopped():
        ahead.compute_bitmask()
    error = ahead.get_error()
    return "" if NOT_ALLOWED in error else error  # an answer may take that text in other tokens


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
