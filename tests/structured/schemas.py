"""Random JSON schemas that have a short answer."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.sampled_from(["a", "name", "é", "x y", "", '"', "日本"])
LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-9, 99),
        st.integers(0, 900),
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 1}, st.integers(-3, 3)),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from(["^[a-c]{2,4}$", "^(ab|é)+z$", "\\d{3}-\\d{2}"]).map(
        lambda of: {"type": "string", "pattern": of, "maxLength": 12}
    ),
    st.sampled_from(["date", "uuid", "ipv4", "date-time"]).map(lambda of: {"type": "string", "format": of}),
    st.lists(st.one_of(NAMES, st.integers(-5, 5), st.booleans(), st.none()), min_size=1, max_size=4).map(
        lambda of: {"enum": of}
    ),
    st.one_of(NAMES, st.integers(-(1 << 53), 1 << 53)).map(lambda of: {"const": of}),
)


def _object(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(_object, st.dictionaries(NAMES, inner, max_size=3), st.sets(NAMES, max_size=2)),
        st.builds(
            lambda of, least, more: {"type": "array", "items": of, "minItems": least, "maxItems": least + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda of: {"anyOf": of}),
        inner.map(lambda of: {"type": "array", "prefixItems": [of], "items": False, "minItems": 1}),
    )


SCHEMAS = st.recursive(LEAVES, _deeper, max_leaves=5)
ROOTED = st.builds(lambda of: {"$defs": {"t": of}, "$ref": "#/$defs/t"}, SCHEMAS)
