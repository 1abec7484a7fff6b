"""Groups of endpoints that need a header of their own: what NVIDIA's OpenAI frontend and tritonserver restrict."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence

import msgspec
from starlette.datastructures import Headers

from clients.openai.errors import ApiError

# A path belongs to the first group whose pattern it matches; the pages and the description belong to none.
GROUPS: dict[str, re.Pattern[str]] = {
    "model-repository": re.compile(r"/v1/models(/.*)?", re.DOTALL),
    "metrics": re.compile(r"/metrics|/stats|/load"),
    "health": re.compile(r"/health(/.*)?|/ping"),
    "inference": re.compile(r"/v1/.*|/tokenize|/detokenize|/invocations", re.DOTALL),
}
_FORM = re.compile(r"(?P<groups>[^:]*):(?P<header>[!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?P<value>.+)", re.DOTALL)


class Restriction(msgspec.Struct, frozen=True):
    """Endpoints of `groups` are for requests whose `header` has `value`."""

    groups: tuple[str, ...]
    header: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Restriction:
        """`GROUP[,GROUP...]:HEADER=VALUE`. Raises ValueError, without the value in its sentence."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise ValueError("--openai-restricted-api is GROUP[,GROUP...]:HEADER=VALUE")
        groups = tuple(match["groups"].split(","))
        for group in groups:
            if group not in GROUPS:
                raise ValueError(f"Unknown API {group!r} in --openai-restricted-api; there are {', '.join(GROUPS)}")
        return cls(groups, match["header"], match["value"])


class Restrictions:
    """What `restrictions` say of requests. Raises ValueError when a group stands in two of them."""

    def __init__(self, restrictions: Sequence[Restriction]) -> None:
        self._by_group: dict[str, Restriction] = {}
        for one in restrictions:
            for group in one.groups:
                if group in self._by_group:
                    raise ValueError(
                        f"restricted api '{group}' can not be specified in multiple config groups: "
                        "name it once in --openai-restricted-api"
                    )
                self._by_group[group] = one

    def admits(self, path: str, headers: Headers) -> str | None:
        """The group of `path` when its header was sent; None for a path that is not restricted. Raises ApiError 401."""
        group = next((name for name, paths in GROUPS.items() if paths.fullmatch(path)), "")
        found = self._by_group.get(group)
        if found is None:
            return None
        given = headers.get(found.header)
        if given is None:
            raise ApiError(401, f"A key is needed: send the header `{found.header}`.", code="missing_api_key")
        if not hmac.compare_digest(given.encode("latin-1"), found.value.encode()):
            raise ApiError(401, f"The header `{found.header}` has an incorrect key.", code="invalid_api_key")
        return group
