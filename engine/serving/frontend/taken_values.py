"""What a field of a settings struct takes, in words: for the sentence that refuses something else."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import inspect


def taken_values(config: type, names: Sequence[str]) -> str | None:
    """What the field takes that `names` lead to from the struct `config`, "true, false or auto", beside leaving it out.
    None where that is a list or a struct, and where there is no such field."""
    kind: inspect.Type = inspect.type_info(config)
    for name in names:
        fields = kind.fields if isinstance(kind, inspect.StructType) else ()
        found = [field.type for field in fields if field.encode_name == name]
        if not found:
            return None
        kind = found[0]
    parts = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    each = [_values(part) for part in parts if not isinstance(part, inspect.NoneType)]
    if not all(each):
        return None
    *first, last = [value for values in each if values for value in values]
    return f"{', '.join(first)} or {last}" if first else last


def _values(kind: inspect.Type) -> tuple[str, ...] | None:
    if isinstance(kind, inspect.BoolType):
        return ("true", "false")
    if isinstance(kind, inspect.LiteralType):
        return tuple(map(str, kind.values))
    if isinstance(kind, inspect.StrType):
        return ("text",)
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        return (_numbers(kind),)
    return None


def _numbers(kind: inspect.IntType | inspect.FloatType) -> str:
    named, form = ("a whole number", ",") if isinstance(kind, inspect.IntType) else ("a number", "g")
    bounds = {"from": kind.ge, "above": kind.gt, "to": kind.le, "below": kind.lt}
    return " ".join((named, *(f"{word} {bound:{form}}" for word, bound in bounds.items() if bound is not None)))
