"""The two paths that Amazon SageMaker asks of a container: GET /ping and POST /invocations.

An invocation is a chat request when it brings `messages`, and a completion when it brings `prompt`; as SageMaker's
callers name no model, it may be left out where one is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from clients.openai.answers import ERRORS, STREAMED
from clients.openai.chat import chat
from clients.openai.completions import complete
from clients.openai.encode import json_response
from clients.openai.errors import ApiError
from clients.openai.json_route import checked, json_of
from clients.openai.schema import ChatRequest, CompletionRequest
from clients.openai.shim import Shim


def add(app: FastAPI, shim: Shim, health: Callable[[], dict[str, Any]]) -> None:
    """health: what GET /ping answers; it raises ApiError while nothing is served."""

    @app.post("/ping", responses=ERRORS, include_in_schema=False)
    @app.get("/ping", responses=ERRORS, tags=["service"], summary="As /health")
    async def ping() -> Response:
        return json_response(health())

    @app.post("/invocations", responses=STREAMED, tags=["generate"], summary="A chat request or a completion")
    async def invocations(http: Request) -> Response:
        data = await json_of(http)
        try:
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        except ValueError as error:
            raise ApiError(400, f"The request body is not a JSON object: {error}", code="invalid_json") from None
        if "model" not in fields:
            fields["model"] = msgspec.Raw(msgspec.json.encode(shim.router.model_or_only(None).name))
        data = msgspec.json.encode(fields)
        if "messages" in fields:
            return await chat(shim, http, checked(ChatRequest, data, http))
        if "prompt" in fields:
            return await complete(shim, http, checked(CompletionRequest, data, http))
        raise ApiError(400, "Send `messages` for chat or `prompt` for a completion.", param="prompt")
