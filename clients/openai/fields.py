"""Fields that a request brings and the schema does not know: reported by default, refused with --strict-fields."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from clients.openai.body import Strict
from clients.openai.errors import ApiError
from engine.types import shown

log = logging.getLogger("nereid.openai")

HEADER = "X-Ignored-Fields"
_OF_SDKS = frozenset({"api-version", "beta"})  # of Azure's and Anthropic's: which form of the API they speak
_MAX_REPORTED = 16  # of one request
_MAX_LOGGED = 256  # names by one worker: a client can make up any number


class UnknownFields:
    """strict: an unknown field is refused by name. Otherwise its name goes into a response header, and into the log
    when it is met first."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def take_out(self, body: Strict, query: Iterable[str] = ()) -> tuple[str, ...]:
        """Remove what is unknown from a request: its names, as the header shows them. Raises ApiError when strict.

        query: names of parameters in the request's target, all of them unknown but for what SDKs always send.
        """
        found: dict[str, None] = {}
        for path in itertools.chain(_removed(body, ""), (f"?{name}" for name in query if name not in _OF_SDKS)):
            if self._strict:
                message = f"Unrecognized request argument supplied: {shown(path)}"
                raise ApiError(400, message, param=path, code="unknown_parameter")
            if len(found) < _MAX_REPORTED:
                found[quote(shown(path), safe=".[]?")] = None
        for name in found:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                log.warning("requests bring the unknown field %s: it is ignored (--strict-fields refuses it)", name)
        return tuple(found)


def _removed(model: Strict, prefix: str) -> Iterator[str]:
    extra = model.__pydantic_extra__
    if extra:
        for name in list(extra):
            del extra[name]
            yield prefix + name
    for name, value in vars(model).items():
        if isinstance(value, Strict):
            yield from _removed(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], Strict):
            for place, item in enumerate(value):
                yield from _removed(item, f"{prefix}{name}[{place}].")
