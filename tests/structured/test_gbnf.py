"""GBNF: what its texts are, and where one is no grammar."""

from __future__ import annotations

import json

import pytest

from engine.structured import gbnf
from engine.types import Constraint
from tests.structured.marked import Marked

MARKED = Marked()


@pytest.mark.parametrize(
    ("rules", "texts", "others"),
    [
        ('root ::= a "b"\na ::= [a-z]*', ["aab", "b"], ["aa"]),
        ('root ::= "if " expr " then"\nexpr ::= [a-z ]+', ["if a then then"], ["if then"]),
        ('root ::= "\\u00e9" [\\u00e0-\\u00ff] "\\U0001F642" "\\x41"', ["éà🙂A"], ["éa🙂A"]),
        ('root ::= [&&] [~~] [+--] "\\[" [^\\]^]', ["&~+[b", "&~,[["], ["&~b[b", "&~+[]", "&~+[^"]),
        ("root ::= .{2}", ["a\n", "日本"], ["a"]),
        ('root ::= Foo foo foo-bar foo_bar\nFoo ::= "a"\nfoo ::= "b"\nfoo-bar ::= "c"\nfoo_bar ::= "d"', ["abcd"], []),
        ('root ::= start # a comment "\nstart ::= "a"\n  | "b" |', ["a", "b", ""], ["c"]),
        ('root ::= ("a" | ) "b"{2} [c]{,2} "d"{1,}', ["abbccd", "bbd"], ["abd", "bbcccd"]),
        ('root ::= "x" | "(" root ")" | root "+" root', ["x", "((x+x))+x"], ["(x"]),
        ('root ::= "tab\\t" "quote\\"" "a\nb"', ['tab\tquote"a\nb'], []),
    ],
)
def test_a_grammar_allows_its_texts(rules: str, texts: list[str], others: list[str]) -> None:
    grammar = Constraint(kind="grammar", text=rules)
    assert [text for text in texts if not MARKED.accepts(grammar, text)] == []
    assert [text for text in others if MARKED.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ('root ::= "a', "a text or class is not closed"),
        ('root ::= "a" "\\', "a text or class is not closed"),
        ("root ::= [a", "a text or class is not closed"),
        ('root ::= "\\q"', "no such escape"),
        ('root ::= "\\u12"', "takes 4 hexadecimal digits"),
        ('root ::= "\\ud800"', "is no character"),
        ("root ::= [z-a]", "a range goes upwards"),
        ("root ::= []", "a class holds something"),
        ("root ::= (a", "a group is not closed"),
        ('root ::= "a"{3,2}', "a count is"),
        ('root ::= "a"**', "no part of a rule"),
        ("root ::= " + "(" * 200, "nested more than 100 deep"),
        ("root ::= x", "'x' is not defined"),
        ('a ::= "a"', "no rule 'root'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, .*: the rule 'root' is defined twice"),
        ("::=", "begins with its name"),
    ],
)
def test_what_is_none_is_refused_with_its_place(rules: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        gbnf.to_lark(rules)


def test_lark_is_told_from_it() -> None:
    assert gbnf.is_gbnf('root ::= start\nstart ::= "a"')
    assert not gbnf.is_gbnf('start: "a" "::="')
    assert not gbnf.is_gbnf('start: "a"')


def test_what_has_one_way_to_be_written_takes_little_time() -> None:
    """Each a quarter of a megabyte, which a square of would take minutes."""
    chain = "\n".join(f"{i or 'root'} ::= {i + 1}" for i in range(15_000)) + '\n15000 ::= "x"'
    for rules in ("root ::= " + '"x"* ' * 40_000, f"root ::= {json.dumps('a' * 200_000)}", chain):
        assert gbnf.to_lark(rules)
