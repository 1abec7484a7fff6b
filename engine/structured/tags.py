"""A structural tag as a grammar: text that is free up to a tag, and the parts of a schema, grammar or text within.

Text ends at the first of what may end it: a trigger, or the end of the tag around it. Text outside of all tags may hold
special tokens as any answer may; within a tag it is text alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.structured import formats, lark, notations
from engine.structured.formats import Format
from engine.structured.lark_rules import ANY_TEXT, Rules, SpecialTokens, quoted, regex, token
from engine.structured.styles import JSON, NAMES, XML
from engine.types import shown

MAX_DEPTH = 64

# Texts of which the first ends what stands before them; () at the end of an answer.
Ends = Sequence[str]


def grammar(given: Any, tokens: SpecialTokens, json: Callable[[Any], str]) -> str:
    """given: the structural tag. json: the grammar of a schema, which raises ValueError for what it cannot hold.

    Raises ValueError with the name of the element that cannot be honoured.
    """
    rules = Rules(tokens)
    return rules.written(_Tags(rules, json).expression(formats.parsed(given), (), 0))


class _Tags:
    def __init__(self, rules: Rules, json: Callable[[Any], str]) -> None:
        self._rules = rules
        self._tokens = rules.tokens
        self._json = json

    def expression(self, of: Format, ends: Ends, depth: int) -> str:
        """A format, and one of `ends` behind it."""
        if depth > MAX_DEPTH:
            raise ValueError(f"formats are nested more than {MAX_DEPTH} deep")
        inner = depth + 1
        if isinstance(of, formats.AnyText):
            return self._any_text(of, ends)
        if isinstance(of, formats.Regex):
            return self._rules.until(regex(of.pattern), ends)
        if isinstance(of, formats.Sequence):
            return self._sequence(of.elements, ends, inner)
        if isinstance(of, formats.Or):
            return self._either(self.expression(each, ends, inner) for each in of.elements)
        if isinstance(of, formats.Tag) and _no_end(of):
            return f"{self._begin(of)} {self.expression(of.content, ends, inner)}"
        if isinstance(of, formats.TriggeredTags | formats.TokenTriggeredTags):
            return self._triggered(of, ends, inner)
        if isinstance(of, formats.Dispatch | formats.TokenDispatch):
            return self._dispatched(of, ends, inner)
        return f"({self._closed(of, inner)}) {self._any_of(ends)}".strip()

    def _dispatched(self, of: formats.Dispatch | formats.TokenDispatch, ends: Ends, depth: int) -> str:
        rules = []
        for i, (trigger, each) in enumerate(of.rules):
            if not self._ends_itself(each):
                raise ValueError(f"{_name(of)}.rules[{i}]: {_name(each)} goes on without end: put it into a tag")
            rules.append((self._trigger(trigger), self.expression(each, (), depth)))
        return self._dispatch(rules, of.loop, self._excluded(_excludes(of)), ends)

    def _closed(self, of: Format, depth: int) -> str:
        """A format that ends by itself."""
        if isinstance(of, formats.ConstString):
            return self._rules.literal(of.value) or '""'
        if isinstance(of, formats.JsonSchema | formats.XmlArguments):
            return self._schema(of)
        if isinstance(of, formats.Grammar):
            return self._rules.grammar(lark.grammar(of.grammar))
        if isinstance(of, formats.Token):
            return token(self._id(of.token))
        if isinstance(of, formats.ExcludeToken | formats.AnyTokens):
            one = token(*self._ids(of.exclude_tokens), *self._tokens.eos, but=True)
            if isinstance(of, formats.ExcludeToken):
                return one
            return f"{one}*" if of.max_tokens is None else f"{one}{{0,{of.max_tokens}}}"
        if isinstance(of, formats.Tag):
            return self._tag(of, depth)
        if isinstance(of, formats.TagsWithSeparator):
            one = self._either(self._tag(each, depth) for each in of.tags)
            more = "" if of.stop_after_first else f" ({self._rules.literal(of.separator)} {one})*"
            return f"{one}{more}" if of.at_least_one else f"({one}{more})?"
        assert isinstance(of, formats.Optional | formats.Star | formats.Plus | formats.Repeat)
        if not self._ends_itself(of.content):
            raise ValueError(f"{_name(of)}: {_name(of.content)} goes on without end, so it can stand once only")
        content = self._rules.rule(self.expression(of.content, (), depth))
        if isinstance(of, formats.Repeat):
            if 0 <= of.max < of.min:
                raise ValueError(f"repeat.max is {of.max}, less than its min, {of.min}")
            return f"{content}{{{of.min},{'' if of.max < 0 else of.max}}}"
        return content + {formats.Optional: "?", formats.Star: "*", formats.Plus: "+"}[type(of)]

    def _any_text(self, of: formats.AnyText, ends: Ends) -> str:
        if of.max_tokens is not None:
            raise ValueError(
                "any_text.max_tokens cannot be held to: any_tokens has one, and thinking is bounded by think_tokens"
            )
        return self._dispatch([], True, self._excluded(of.excludes), ends)

    def _sequence(self, elements: Sequence[Format], ends: Ends, depth: int) -> str:
        """Elements in a row. What goes on without end stops at the text that the next one begins with."""
        parts: list[str] = []
        begun = False  # the text that this element begins with stands already
        for i, each in enumerate(elements):
            following = elements[i + 1] if i + 1 < len(elements) else None
            behind: Ends = ends if following is None else ()
            taken = False
            if following is not None and not self._ends_itself(each):
                behind, taken = (_head(following),), True
                if not behind[0]:
                    why = f"{_name(each)} goes on without end, so a const_string or a tag has to follow"
                    raise ValueError(f"sequence.elements[{i}]: {why}")
            if not begun:
                parts.append(self.expression(each, behind, depth))
            elif isinstance(each, formats.Tag):
                parts.append(
                    self._tag(each, depth, begun=each.begin) if not behind else self._tag_then(each, behind, depth)
                )
            else:
                parts.append(self._any_of(behind))
            begun = taken
        return " ".join(part for part in parts if part)

    def _tag_then(self, of: formats.Tag, ends: Ends, depth: int) -> str:
        if _no_end(of):
            return self.expression(of.content, ends, depth)
        return f"{self._tag(of, depth, begun=of.begin)} {self._any_of(ends)}"

    def _tag(self, of: formats.Tag, depth: int, begun: str | formats.Token = "") -> str:
        """A tag with its end. begun: what stands of its beginning already."""
        opening = self._begin(of, begun)
        if isinstance(of.end, formats.Token):
            ends = [self._text(self._id(of.end.token))]
        else:
            ends = [of.end] if isinstance(of.end, str) else of.end
        if "" in ends or not ends:
            if not self._ends_itself(of.content):
                raise ValueError(f"tag.end is empty, and its {_name(of.content)} goes on without end")
            ends = [end for end in ends if end]
            content = self.expression(of.content, (), depth)
            return f"{opening} {content} {f'({self._any_of(ends)})?' if ends else ''}".strip()
        return f"{opening} {self.expression(of.content, ends, depth)}".strip()

    def _begin(self, of: formats.Tag, begun: str | formats.Token = "") -> str:
        if isinstance(of.begin, formats.Token):
            return "" if begun == of.begin else token(self._id(of.begin.token))
        assert isinstance(begun, str)
        return self._rules.literal(of.begin[len(begun) :])

    def _triggered(self, of: formats.TriggeredTags | formats.TokenTriggeredTags, ends: Ends, depth: int) -> str:
        rules: list[tuple[str, str]] = []
        by_token = isinstance(of, formats.TokenTriggeredTags)
        triggers = of.trigger_tokens if isinstance(of, formats.TokenTriggeredTags) else of.triggers
        of_trigger: dict[str, list[str]] = {self._trigger(each): [] for each in triggers}
        for i, tag in enumerate(of.tags):
            if isinstance(tag.begin, formats.Token) != by_token:
                raise ValueError(f"{_name(of)}.tags[{i}].begin must be a {'token' if by_token else 'string'}")
            begin = self._text(self._id(tag.begin.token)) if isinstance(tag.begin, formats.Token) else tag.begin
            matching = [trigger for trigger in of_trigger if begin.startswith(trigger)]
            if len(matching) != 1:
                said = "no trigger" if not matching else "several triggers"
                raise ValueError(f"{_name(of)}.tags[{i}].begin {shown(repr(begin))} begins with {said}")
            (trigger,) = matching
            if self._tokens.split(begin) != self._joined(trigger, begin[len(trigger) :]):
                raise ValueError(f"{_name(of)}: the trigger {shown(repr(trigger))} ends within a special token")
            of_trigger[trigger].append(self._tag(tag, depth, tag.begin if by_token else trigger))
        for trigger, made in of_trigger.items():
            if not made:
                raise ValueError(f"{_name(of)}: no tag begins with the trigger {shown(repr(trigger))}")
            rules.append((trigger, self._either(made)))
        excludes = self._excluded(_excludes(of))
        if not of.at_least_one:
            return self._dispatch(rules, not of.stop_after_first, excludes, ends)
        first = self._either(f"{self._rules.literal(trigger)} {made}" for trigger, made in rules)
        if of.stop_after_first:
            return f"{first} {self._any_of(ends)}".strip()
        return f"{first} {self._dispatch(rules, True, excludes, ends)}"

    def _joined(self, trigger: str, rest: str) -> list[str | int]:
        first, second = self._tokens.split(trigger), self._tokens.split(rest)
        if first and second and isinstance(first[-1], str) and isinstance(second[0], str):
            return [*first[:-1], first[-1] + second[0], *second[1:]]
        return [*first, *second]

    def _dispatch(
        self, rules: list[tuple[str, str]], loop: bool, excludes: tuple[list[str], set[int]], ends: Ends
    ) -> str:
        """Free text, each trigger in it followed by its part, up to one of `ends`."""
        plain, special = excludes
        text = self._rules.holding_none(ANY_TEXT, plain)
        split = [(self._tokens.split(trigger), trigger, made) for trigger, made in rules]
        for pieces, trigger, _ in split:
            at = next((i for i, piece in enumerate(pieces) if isinstance(piece, int)), None)
            if at is not None and len([piece for piece in pieces if isinstance(piece, int)]) > 1:
                raise ValueError(
                    f"the trigger {shown(repr(trigger))} holds several special tokens: end it behind the first"
                )
        parts = [self._rules.rule(f"{self._rules.until(text, [trigger])} {made}") for _, trigger, made in split]
        if ends:
            tail = self._rules.until(text, ends)
            if not parts:
                return tail
            if loop:
                return f"({' | '.join(parts)})* {tail}"
            return f"(({' | '.join(parts)}) {self._any_of(ends)} | {tail})"
        return self._outside(text, split, parts, loop, special)

    def _outside(
        self, text: str, split: list[tuple[list[str | int], str, str]], parts: list[str], loop: bool, excluded: set[int]
    ) -> str:
        """Free text outside of all tags, special tokens among it."""
        rules = self._rules
        begun: dict[int, list[str]] = {}  # by a trigger's first special token, the text behind it
        bound = set(self._tokens.eos) | excluded
        for pieces, _, _ in split:
            first = pieces[0]
            if isinstance(first, int):
                bound.add(first)
                if len(pieces) > 1:
                    begun.setdefault(first, []).append(str(pieces[1]))
            else:
                bound |= {piece for piece in pieces if isinstance(piece, int)}
        whole = {pieces[0] for pieces, _, _ in split if len(pieces) == 1}
        begun = {first: texts for first, texts in begun.items() if first not in whole and first not in excluded}
        free = sorted(set(self._tokens.ids.values()) - bound)
        if not free and not begun:
            tail = rules.terminal(text)
            if not parts:
                return tail
            return f"({' | '.join(parts)})* {tail}" if loop else f"(({' | '.join(parts)}) | {tail})"
        state = rules.later()
        behind = {first: rules.later() for first in begun}  # right behind a token that a trigger begins with
        again = f" {state}" if loop else ""

        def after(text: str, parts: list[str]) -> str:
            held = rules.terminal(text)
            going_on = [f"{part}{again}" for part in parts] + [held]
            if free:
                going_on.append(f"{held} {token(*free)} {state}")
            going_on += [f"{held} {token(first)} {name}" for first, name in behind.items()]
            return " | ".join(going_on)

        rules.define(
            state,
            after(text, [part for part, (pieces, _, _) in zip(parts, split, strict=True) if pieces[0] not in begun]),
        )
        for first, name in behind.items():
            at_once = [
                f"{' '.join(quoted(str(piece)) for piece in pieces[1:])} {made}{again}"
                for pieces, _, made in split
                if pieces[0] == first
            ]
            other = rules.beginning_with_none(text, begun[first])
            later = [
                rules.rule(f"{rules.until(other, [trigger])} {made}")
                for pieces, trigger, made in split
                if pieces[0] not in begun
            ]
            rules.define(name, " | ".join([*at_once, after(other, later)]))
        return state

    def _schema(self, of: formats.JsonSchema | formats.XmlArguments) -> str:
        style = XML if isinstance(of, formats.XmlArguments) else of.style
        if style not in NAMES:
            raise ValueError(f"json_schema.style {shown(repr(style))} is unknown; styles are {', '.join(NAMES)}")
        if isinstance(of, formats.JsonSchema) and of.any_order:
            raise ValueError("json_schema.any_order: properties come in the schema's order here, send false")
        if style == JSON:
            return self._rules.grammar(self._json(of.json_schema))
        return self._rules.rule(notations.arguments(of.json_schema, style, self._rules))

    def _ends_itself(self, of: Format) -> bool:
        if isinstance(of, formats.Sequence):
            return self._ends_itself(of.elements[-1])
        if isinstance(of, formats.Or):
            return all(map(self._ends_itself, of.elements))
        if isinstance(of, formats.Tag):
            return not _no_end(of) or self._ends_itself(of.content)
        if isinstance(of, formats.TriggeredTags | formats.TokenTriggeredTags):
            return of.at_least_one and of.stop_after_first
        return not isinstance(of, formats.AnyText | formats.Dispatch | formats.TokenDispatch)

    def _any_of(self, ends: Ends) -> str:
        return self._either(self._rules.literal(end) for end in ends) if ends else ""

    def _either(self, made: Any) -> str:
        parts = [part or '""' for part in made]
        return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"

    def _excluded(self, excludes: Sequence[str | int]) -> tuple[list[str], set[int]]:
        """Texts and special tokens."""
        texts: list[str] = []
        ids: set[int] = set()
        for each in excludes:
            pieces = [each] if isinstance(each, int) else self._tokens.split(each)
            if len(pieces) != 1:
                raise ValueError(f"excludes: {shown(repr(each))} is empty, or a special token with text beside it")
            (piece,) = pieces
            ids |= {piece} if isinstance(piece, int) else set()
            texts += [piece] if isinstance(piece, str) else []
        return texts, ids

    def _trigger(self, given: str | int) -> str:
        return given if isinstance(given, str) else self._text(given)

    def _text(self, special: int) -> str:
        found = next((text for text, each in self._tokens.ids.items() if each == special), None)
        if found is None:
            raise ValueError(f"token {special} is no special token of this model's tokenizer: send text instead")
        return found

    def _ids(self, given: Sequence[int | str]) -> list[int]:
        return [self._id(each) for each in given]

    def _id(self, given: int | str) -> int:
        if isinstance(given, int):
            return given
        if given not in self._tokens.ids:
            raise ValueError(f"token {shown(repr(given))} is no special token of this model's tokenizer")
        return self._tokens.ids[given]


def _head(of: Format) -> str:
    """The text that a format begins with; "" where it has none."""
    head = of.value if isinstance(of, formats.ConstString) else of.begin if isinstance(of, formats.Tag) else ""
    return head if isinstance(head, str) else ""


def _no_end(of: formats.Tag) -> bool:
    return of.end in ("", [], [""])


def _excludes(of: Format) -> Sequence[str | int]:
    if isinstance(of, formats.TokenTriggeredTags | formats.TokenDispatch):
        return of.exclude_tokens
    assert isinstance(of, formats.TriggeredTags | formats.Dispatch)
    return of.excludes


def _name(of: Format) -> str:
    return str(type(of).__struct_config__.tag)
