"""Triton's HTTP `generate_stream`: one JSON object in, server-sent events out."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

from clients.python.wire import ServerError


def generate_stream(address: str, model: str, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one request, as objects. address: host:port. Raises ServerError with the server's sentence."""
    connection = http.client.HTTPConnection(address)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(dict(request)), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _error(response.read(), str(response.status))
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line[len(b"data:") :])
                if "error" in event:
                    raise ServerError(str(event["error"]), "UNKNOWN")
                yield event
    finally:
        connection.close()


def _error(body: bytes, code: str) -> ServerError:
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"])
    return ServerError(text, code)
