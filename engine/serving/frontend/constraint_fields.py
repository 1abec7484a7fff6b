"""Constraints from what clients send: OpenAI's response_format, vLLM's structured_outputs and guided_* fields, SGLang's
json_schema, regex, ebnf and structural_tag, and TensorRT-LLM's tensors guided_decoding_guide_type and
guided_decoding_guide."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from engine.types import Constraint, ErrorCode, RequestError, shown

_ANY_OBJECT = '{"type": "object"}'
_GUIDES = "json, json_schema, regex, ebnf_grammar or structural_tag"
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
_OURS = ("prefix", "think", "tags", "think_tokens")


def taken(fields: Mapping[str, Any]) -> tuple[Constraint | None, dict[str, Any]]:
    """The constraint in a request's fields, if any, and the other fields. Raises RequestError for one that cannot be
    honoured and when there are two."""
    rest = {name: value for name, value in fields.items() if name not in NAMES}
    if len(rest) == len(fields):
        return None, rest
    found = {name: value for name, value in fields.items() if name in NAMES and not _nothing(name, value)}
    _backend(found.pop("guided_decoding_backend", None))
    pattern = fields.get("guided_whitespace_pattern")  # an empty one allows no white space
    found.pop("guided_whitespace_pattern", None)
    made: dict[str, Constraint] = {}
    constraint: Constraint | None
    for name, value in found.items():
        if name == "guided_decoding_guide":
            continue
        if name == "guided_decoding_guide_type":
            constraint = _guide(value, found.get("guided_decoding_guide"))
        elif name in ("structured_outputs", "guided_decoding"):
            constraint = _structured(name, value)
        elif name == "response_format":
            constraint = _response_format(value)
        else:
            constraint = _KINDS[_FLAT[name]](name, value)
        if constraint is not None:
            made[name] = constraint
    if "guided_decoding_guide" in found and "guided_decoding_guide_type" not in found:
        raise RequestError(f"guided_decoding_guide needs guided_decoding_guide_type: {_GUIDES}")
    if len(made) > 1:
        raise RequestError(f"{' and '.join(made)} both say what the answer must be: send one of them")
    only = next(iter(made.values()), None)
    return only if pattern is None else _spaced(only, "guided_whitespace_pattern", pattern), rest


def _json(name: str, value: Any) -> Constraint:
    """A schema as an object, or as the text of one."""
    return _made("json", _text(name, value) if isinstance(value, str) else _dumped(name, value))


def _json_object(name: str, value: Any) -> Constraint | None:
    if not isinstance(value, bool) and str(value).lower() not in ("true", "false"):
        raise RequestError(f"{name} must be true or false")
    return _made("json", _ANY_OBJECT) if str(value).lower() == "true" else None


def _choice(name: str, value: Any) -> Constraint:
    if isinstance(value, str):
        value = _parsed(name, value)
    if not isinstance(value, list | tuple) or any(not isinstance(item, str) for item in value):
        raise RequestError(f"{name} must be a list of strings")
    if not value:
        raise RequestError(f"{name} is an empty list, which no answer is one of: name the choices, or leave it out")
    return _made("choice", _dumped(name, list(value)))


def _regex(name: str, value: Any) -> Constraint:
    return _made("regex", _text(name, value))


def _grammar(name: str, value: Any) -> Constraint:
    return _made("grammar", _text(name, value))


def _tag(name: str, value: Any) -> Constraint:
    """xgrammar's structural tag, or the older form of structures and triggers; the text of either."""
    given = _parsed(name, value) if isinstance(value, str) else value
    if not isinstance(given, dict) or ("format" not in given and not given.keys() >= {"structures", "triggers"}):
        raise RequestError(f"{name} must be a JSON object with `format`, or with `structures` and `triggers`")
    return _made("structural_tag", _dumped(name, given))


_KINDS: dict[str, Callable[[str, Any], Constraint | None]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _tag,
}
_FLAT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
NAMES = frozenset(
    {
        *_FLAT,
        "structured_outputs",
        "guided_decoding",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "guided_decoding_guide_type",
        "guided_decoding_guide",
        "response_format",
    }
)


def _structured(name: str, value: Any) -> Constraint | None:
    """vLLM's object, or the text of one: exactly one kind, and what is said besides. Or a Constraint as it is."""
    given = _parsed(name, value) if isinstance(value, str) else value
    if not isinstance(given, dict):
        raise RequestError(f'{name} must be a JSON object such as {{"json": {{...}}}}, or the text of one')
    if "kind" in given:
        return _constraint(given)
    given = {key: inner for key, inner in given.items() if inner is not None}
    _backend(given.pop("backend", None))
    more = {key: given.pop(key) for key in (*_SWITCHES, "whitespace_pattern", *_OURS) if key in given}
    for key in _SWITCHES:
        if not isinstance(more.get(key, False), bool):
            raise RequestError(f"{name}.{key} must be true or false")
    kinds = sorted(given)
    unknown = [key for key in kinds if key not in _KINDS]
    if unknown:
        raise RequestError(f"{name} holds the unknown key {shown(repr(unknown[0]))}; known are {', '.join(_KINDS)}")
    if len(kinds) != 1:
        raise RequestError(f"{name} must hold exactly one of {', '.join(_KINDS)}, and it holds {len(kinds)}")
    constraint = _KINDS[kinds[0]](f"{name}.{kinds[0]}", given[kinds[0]])
    if more.get("disable_additional_properties"):
        raise RequestError(
            f"{name}.disable_additional_properties is not implemented: write additionalProperties into the schema",
            ErrorCode.UNSUPPORTED,
        )
    if more.get("disable_any_whitespace"):
        constraint = _spaced(constraint, f"{name}.disable_any_whitespace", "")
    if more.get("whitespace_pattern") is not None:
        constraint = _spaced(constraint, f"{name}.whitespace_pattern", more["whitespace_pattern"])
    ours = {key: more[key] for key in _OURS if key in more}
    return constraint if constraint is None else _made(constraint.kind, constraint.text, constraint.whitespace, **ours)


def _response_format(value: Any) -> Constraint | None:
    """OpenAI's object, or the text of one."""
    given = _parsed("response_format", value) if isinstance(value, str) else value
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # as other servers take it
        return _made("json", _ANY_OBJECT) if schema is None else _json("response_format.schema", schema)
    if kind == "json_schema":
        schema = (given.get("json_schema") or {}).get("schema") if isinstance(given.get("json_schema"), dict) else None
        if schema is None:
            raise RequestError("response_format.json_schema.schema is missing: send the JSON schema there")
        return _json("response_format.json_schema.schema", schema)
    if kind == "structural_tag":
        return _tag("response_format", given)
    raise RequestError("response_format.type must be text, json_object, json_schema or structural_tag")


def _guide(kind: Any, guide: Any) -> Constraint:
    """TensorRT-LLM's pair of tensors, one string each."""
    kind, guide = (value[0] if isinstance(value, list) and len(value) == 1 else value for value in (kind, guide))
    if kind == "json":
        if guide:
            raise RequestError("guided_decoding_guide goes with a type that needs one: for a schema send json_schema")
        return _made("json", _ANY_OBJECT)
    kinds = {"json_schema": _json, "regex": _regex, "ebnf_grammar": _grammar, "structural_tag": _tag}
    if not isinstance(kind, str) or kind not in kinds:
        raise RequestError(f"guided_decoding_guide_type must be {_GUIDES}, not {shown(repr(kind))}")
    if not guide:
        raise RequestError(f"guided_decoding_guide is missing: {kind} needs it")
    made = kinds[kind]("guided_decoding_guide", guide)
    assert made is not None
    return made


def _spaced(constraint: Constraint | None, name: str, pattern: Any) -> Constraint:
    if constraint is None or constraint.kind != "json":
        raise RequestError(f"{name} says what stands between tokens of JSON: it goes with a schema")
    return _made("json", constraint.text, _text(name, pattern) if pattern else "")


def _backend(value: Any) -> None:
    """vLLM's name for who makes the masks; all of them promise the same."""
    if value is not None and not isinstance(value, str):
        raise RequestError("guided_decoding_backend must be a string; grammars are compiled by llguidance here")


def _made(kind: str, text: str, whitespace: str | None = None, **ours: Any) -> Constraint:
    return _constraint({"kind": kind, "text": text, "whitespace": whitespace, **ours})


def _constraint(fields: dict[str, Any]) -> Constraint:
    try:
        return msgspec.convert(fields, Constraint)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"structured_outputs: {shown(str(error).removeprefix('structured_outputs: '), 200)}"
        ) from None


def _nothing(name: str, value: Any) -> bool:
    """Values that ask for nothing. Request parameters of Triton have no null, so clients write it as a text. In an
    expression or a grammar those letters are letters like any others."""
    if name == "guided_decoding_guide":
        return value in (None, "", [])
    if name == "guided_decoding_guide_type" and value == []:  # a tensor without elements
        return True
    if value is None or _FLAT.get(name) in ("regex", "grammar"):
        return value is None
    return isinstance(value, str) and value.strip().lower() in ("", "none", "null")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} must be a string, and not an empty one; leave it out to ask for nothing")
    return value


def _parsed(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}") from None


def _dumped(name: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} cannot be written as JSON: {error}") from None
