"""Constraints put together of pieces that go badly together: each is compiled or refused, and its masks are in time."""

from __future__ import annotations

import json
import queue
import random
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import Matcher
from engine.demo import make as demo
from engine.structured import grammars
from engine.structured.styles import NAMES
from engine.types import Constraint, RequestError, RequestInput, SamplingParams
from tests.chaos.sized import json_values, sized

_VOCAB_SIZE = 640
_TOKENS = 24
# What one step may take of the engine, and a request of a compiling thread.
_STEP_S = 5.0
_ANSWER_S = grammars.COMPILE_S + 5.0

_atoms = st.sampled_from(
    ["a", "[a-m]", ".", "[^x]", "\\d", "(?s:.)", "é", "", "\\", "(", "[", "\\p{L}", "^", "$", "\\b"]
)
_counts = st.sampled_from(["", "*", "+", "?", "{3}", "{0,200}", "{1000}", "{2,100000}", "{5,2}"])


def _expressions() -> st.SearchStrategy[str]:
    return st.recursive(
        st.tuples(_atoms, _counts).map("".join),
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=4).map("".join),
            st.lists(inner, min_size=1, max_size=4).map("|".join),
            st.tuples(inner, _counts).map(lambda pair: f"({pair[0]}){pair[1]}"),
        ),
        max_leaves=8,
    )


_patterns = _expressions()
_sizes = st.integers(-1, 3) | st.sampled_from([1000, 10**6, 10**30]) | json_values
_numbers = st.integers(-(2**70), 2**70) | st.floats() | json_values


def _schemas() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.booleans(),
        st.fixed_dictionaries(
            {"type": st.just("string")},
            optional={"pattern": _patterns, "minLength": _sizes, "maxLength": _sizes, "format": st.text(max_size=4)},
        ),
        st.fixed_dictionaries(
            {"type": st.sampled_from(["integer", "number"])},
            optional={"minimum": _numbers, "exclusiveMaximum": _numbers, "multipleOf": _numbers},
        ),
        st.fixed_dictionaries({"enum": st.lists(json_values, max_size=4)}),
        st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "x", "file:///etc/passwd"])}),
        json_values,
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, max_size=6)
        named = st.dictionaries(st.sampled_from(["a", "b", "c"]) | _patterns, inner, max_size=3)
        return st.fixed_dictionaries(
            {},
            optional={
                "allOf": several,
                "anyOf": several,
                "oneOf": several,
                "properties": named,
                "patternProperties": named,
                "additionalProperties": inner,
                "required": st.lists(st.text(max_size=2), max_size=3),
                "items": inner,
                "prefixItems": several,
                "minItems": _sizes,
                "maxItems": _sizes,
                "$defs": st.fixed_dictionaries({"a": inner, "b": inner}),
                "type": st.sampled_from(["object", "array", "string", ["object", "null"]]) | json_values,
                "x-guidance": json_values,
            },
        )

    return st.recursive(leaves, larger, max_leaves=10)


_rules = st.recursive(
    st.sampled_from(['"a"', "/[a-z ]*/", "s", "t", "A", "B", '""', "<[1]>", "<[^2-9]>", "@x", "%json {}", "//"])
    | _patterns.map(lambda pattern: f"/{pattern}/"),
    lambda inner: st.one_of(
        *(st.lists(inner, min_size=1, max_size=4).map(mark.join) for mark in (" ", " | ", " & ")),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2,900}", "{100000}"])).map(lambda p: f"({p[0]}){p[1]}"),
        inner.map(lambda rule: f"~{rule}"),
    ),
    max_leaves=8,
)
_larks = st.tuples(_rules, _rules, _rules, _rules).map(
    lambda rules: "\n".join(f"{name}: {rule}" for name, rule in zip(("start", "s", "t", "A"), rules, strict=True))
)
_texts = st.sampled_from(["", "<a>", "</a>", "<|im_end|>", "<", "a"]) | st.text(max_size=5)


def _formats() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.builds(lambda text: {"type": "const_string", "value": text}, _texts),
        st.builds(lambda pattern: {"type": "regex", "pattern": pattern}, _patterns),
        st.builds(lambda lark: {"type": "grammar", "grammar": lark}, _larks),
        st.builds(lambda excludes: {"type": "any_text", "excludes": excludes}, st.lists(_texts, max_size=3)),
        st.builds(
            lambda schema, style: {"type": "json_schema", "json_schema": schema, "style": style},
            _schemas(),
            st.sampled_from(NAMES),
        ),
        st.builds(lambda token: {"type": "token", "token": token}, st.integers(-1, 700) | _texts),
        json_values,
    )

    def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, max_size=4)
        tag = st.builds(
            lambda begin, content, end: {"type": "tag", "begin": begin, "content": content, "end": end},
            _texts,
            inner,
            _texts | st.lists(_texts, max_size=3),
        )
        return st.one_of(
            st.builds(lambda kind, of: {"type": kind, "elements": of}, st.sampled_from(["sequence", "or"]), several),
            st.builds(lambda kind, of: {"type": kind, "content": of}, st.sampled_from(["star", "plus"]), inner),
            st.builds(
                lambda of, least, most: {"type": "repeat", "content": of, "min": least, "max": most},
                inner,
                st.integers(-1, 1001),
                st.integers(-2, 1001),
            ),
            tag,
            st.builds(
                lambda triggers, tags: {"type": "triggered_tags", "triggers": triggers, "tags": tags},
                st.lists(_texts, max_size=3),
                st.lists(tag, max_size=3),
            ),
            st.builds(
                lambda rules: {"type": "dispatch", "rules": rules}, st.lists(st.tuples(_texts, inner), max_size=3)
            ),
        )

    return st.recursive(leaves, larger, max_leaves=8).map(lambda of: {"format": of})


_constraints = st.one_of(
    st.tuples(st.just("json"), _schemas().map(json.dumps)),
    st.tuples(st.just("regex"), _patterns),
    st.tuples(st.just("grammar"), _larks),
    st.tuples(st.just("structural_tag"), _formats().map(json.dumps)),
)


def fuzz_constraints(count: int, number: int) -> None:
    """Each is compiled or refused in time; a few tokens of its answer are drawn, each of whose masks is in time."""
    chance = random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        demo.make(Path(folder) / "demo")
        made = grammars.Grammars(str(Path(folder) / "demo"), _VOCAB_SIZE, (2,))

        @sized(count, number)
        @given(_constraints)
        def check(constraint: tuple[Any, str]) -> None:
            kind, text = constraint
            answer: queue.SimpleQueue[Matcher | RequestError] = queue.SimpleQueue()
            params = SamplingParams(structured_outputs=Constraint(kind=kind, text=text))
            made.make(RequestInput(request_id="r", prompt_ids=[1], params=params), answer.put)
            matcher = answer.get(timeout=_ANSWER_S)
            if isinstance(matcher, RequestError):
                assert "Traceback" not in matcher.message
                return
            for _ in range(_TOKENS):
                began = time.thread_time()
                masks = made.masks([matcher])
                allowed = np.nonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))[0]
                if matcher.error is not None or matcher.ended or not len(allowed):
                    break
                cast(Any, matcher).advance(int(chance.choice(allowed)))
                took = time.thread_time() - began
                assert took < _STEP_S, f"one token took {took:.1f} s"
            assert made._stuck == 0, "a thread that compiles does not come back"

        try:
            check()
        finally:
            made.close()
