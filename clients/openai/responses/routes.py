"""The paths of the Responses API."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from clients.openai.answers import ERRORS, STREAMED_BY_NAME
from clients.openai.encode import json_response
from clients.openai.errors import ApiError
from clients.openai.responses.answer import count_input, create_response, find, owner, page_of
from clients.openai.responses.answers import DeletedAnswer, InputTokensAnswer, ItemsAnswer, ResponseAnswer
from clients.openai.responses.schema import ResponsesRequest
from clients.openai.responses.store import ResponseStore
from clients.openai.shim import Shim
from clients.openai.trace import trace_of


def add(app: FastAPI, shim: Shim, store: ResponseStore) -> None:
    @app.post("/v1/responses", response_model=ResponseAnswer, responses=STREAMED_BY_NAME, tags=["responses"])
    async def responses(http: Request, body: ResponsesRequest) -> Response:
        return await create_response(shim, store, http, body)

    @app.post("/v1/responses/input_tokens", response_model=InputTokensAnswer, responses=ERRORS, tags=["responses"])
    async def input_tokens(http: Request, body: ResponsesRequest) -> Response:
        return await count_input(shim, store, http, body)

    @app.get("/v1/responses/{response_id}", response_model=ResponseAnswer, responses=ERRORS, tags=["responses"])
    async def response(http: Request, response_id: str, stream: bool = False) -> Response:
        if stream:
            raise ApiError(400, "A response is kept whole; `stream` is for the request that makes it.", param="stream")
        return json_response((await find(shim, store, http, response_id)).body)

    @app.delete("/v1/responses/{response_id}", response_model=DeletedAnswer, responses=ERRORS, tags=["responses"])
    async def delete(http: Request, response_id: str) -> Response:
        await find(shim, store, http, response_id)
        await store.delete(response_id, owner(shim, trace_of(http)))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @app.get(
        "/v1/responses/{response_id}/input_items", response_model=ItemsAnswer, responses=ERRORS, tags=["responses"]
    )
    async def input_items(
        http: Request,
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        stored = await find(shim, store, http, response_id)
        return json_response(page_of(stored.items, after, limit, order))

    @app.post("/v1/responses/{response_id}/cancel", response_model=ResponseAnswer, responses=ERRORS, tags=["responses"])
    async def cancel(http: Request, response_id: str) -> Response:
        await find(shim, store, http, response_id)
        raise ApiError(400, "Only a response made in the background can be cancelled; close the connection instead.")
