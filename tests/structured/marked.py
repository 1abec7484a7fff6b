"""A tokenizer of single bytes, some pairs of them and special tokens, and texts held to grammars over it."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.structured import constraint_grammar
from engine.structured.lark_rules import SpecialTokens
from engine.types import Constraint

SPECIAL = (
    "<|eos|>",
    "<|call|>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "｜DSML｜",
    '<|"|>',
    "<|tool_call>",
    "<tool_call|>",
    "[TOOL_CALLS]",
    "[ARGS]",
)
_PAIRS = (b"</", b">{", b'"}', b"}</", b">\n", b"\n<", b": ", b'":', b"call", b"arguments")
FIRST = 256 + len(_PAIRS)


class _Wrapper:
    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = FIRST

    def __init__(self, special: tuple[str, ...]) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [*_PAIRS] + [text.encode() for text in special]
        self.special_token_ids = list(range(FIRST, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class Marked:
    """special: the special tokens; an answer ends by the first two."""

    def __init__(self, special: tuple[str, ...] = SPECIAL) -> None:
        wrapper = _Wrapper(special)
        self.bytes = wrapper.tokens
        ids = {text: FIRST + i for i, text in enumerate(special)}
        self.special = SpecialTokens(ids, frozenset({FIRST, FIRST + 1}))
        self.tokenizer = LLTokenizer(wrapper, len(wrapper.tokens), sorted(self.special.eos))  # type: ignore[arg-type]
        self._split = re.compile("(" + "|".join(map(re.escape, special)) + ")")

    def matcher(self, constraint: Constraint) -> LLMatcher:
        made = constraint_grammar.grammar(constraint, self.special)
        matcher = LLMatcher(self.tokenizer, made, log_level=0, limits=LLParserLimits(verbose_errors=False))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, constraint: Constraint, text: str) -> bool:
        """Whether the masks allow each token of `text`, special ones as such, and then the answer's end."""
        matcher = self.matcher(constraint)
        for token in self.encode(text):
            if not matcher.compute_bitmask()[token // 8] >> token % 8 & 1:
                return False
            assert matcher.consume_token(token), matcher.get_error()
        return matcher.is_accepting()

    def encode(self, text: str) -> list[int]:
        known = self.special.ids
        parts = self._split.split(text)
        return [token for part in parts for token in ([known[part]] if part in known else part.encode())]

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.bytes[token] for token in tokens).decode(errors="replace")
