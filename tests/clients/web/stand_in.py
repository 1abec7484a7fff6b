"""The shim's pages over an OpenAI server on a real socket that says what a test wants: Markdown, HTML, calls."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from clients.openai import web
from clients.python.local_server import free_ports

Deltas = Sequence[Mapping[str, Any]]


class StandIn:
    """answers: the last message's text to the deltas of the answer, or to a sentence that refuses it. Anything else is
    echoed. Several answers begin with their numbers. `held` clear: a stream stops before its last delta."""

    def __init__(self, answers: Mapping[str, str | Deltas], key: str = "") -> None:
        self.answers = dict(answers)
        self.key = key
        self.requests: list[dict[str, Any]] = []
        self.held = threading.Event()
        self.held.set()
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._server = uvicorn.Server(uvicorn.Config(self._app(), port=port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < end, "the stand-in did not start"
            time.sleep(0.02)

    def stop(self) -> None:
        self.held.set()
        self._server.should_exit = True
        self._thread.join(10)

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None)
        web.add(app)

        def refused(http: Request) -> Response | None:
            if self.key and http.headers.get("authorization") != f"Bearer {self.key}":
                return JSONResponse({"error": {"message": "No such key."}}, 401)
            return None

        @app.get("/v1/models")
        async def models(http: Request) -> Response:
            data = [{"id": name} for name in ("qwen3-4b", "llama-3.1-8b")]
            return refused(http) or JSONResponse({"object": "list", "data": data})

        @app.get("/stats")
        async def stats(http: Request) -> Response:
            gauges = {"running": 0, "waiting": 0, "kv_usage": 0.12, "generation_tokens": 5}
            replica = {"ready": True, "models": {"qwen3-4b": gauges}}
            return refused(http) or JSONResponse({"time": time.time(), "replicas": [replica]})

        @app.post("/v1/chat/completions")
        async def chat(http: Request) -> Response:
            body = await http.json()
            self.requests.append(body)
            last = body["messages"][-1]["content"]
            answer = self.answers.get(last, [{"content": f"You said: {last}"}])
            if isinstance(answer, str):
                return JSONResponse({"error": {"message": answer}}, 400)
            events = self._events(answer, body.get("n", 1))
            return refused(http) or StreamingResponse(events, media_type="text/event-stream")

        return app

    async def _events(self, deltas: Deltas, answers: int) -> AsyncIterator[str]:
        if answers > 1:
            for index in reversed(range(answers)):
                yield _event(index, {"content": f"{index + 1}: "})
        for number, delta in enumerate(deltas):
            while number == len(deltas) - 1 and not self.held.is_set():
                await asyncio.sleep(0.02)
            for index in range(answers):
                yield _event(index, delta)
        for index in range(answers):
            yield _event(index, {}, "stop")
        usage = {"prompt_tokens": 31, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 16}}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


def _event(index: int, delta: Mapping[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': index, 'delta': delta, 'finish_reason': finish}]})}\n\n"


def pieces(text: str, size: int = 7) -> Deltas:
    """`text` in small deltas, cut in awkward places."""
    return [{"content": text[at : at + size]} for at in range(0, len(text), size)]
