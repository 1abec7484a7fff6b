"""The application: routes, errors in the API's shape, start and stop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from clients.openai import loading, sagemaker, web
from clients.openai.answers import ERRORS, STREAMED, ChatAnswer, CompletionAnswer, ModelCard, ModelList, Tokens, Words
from clients.openai.chat import chat
from clients.openai.completions import complete
from clients.openai.config import ShimConfig
from clients.openai.encode import error_response, json_response
from clients.openai.errors import ApiError, BackendError, from_validation
from clients.openai.field_names import prompt_field
from clients.openai.fields import HEADER, UnknownFields
from clients.openai.gate import Gate
from clients.openai.json_route import JsonRoute
from clients.openai.messages.answer import count_tokens, create_message
from clients.openai.messages.answers import MESSAGES, CountAnswer, MessageAnswer, listed
from clients.openai.messages.schema import CountRequest, MessagesRequest
from clients.openai.metrics import ShimMetrics
from clients.openai.model_forms import ModelForms
from clients.openai.probe import Probe
from clients.openai.prompts import decode_ids, token_texts, tokenize_source
from clients.openai.request_log import RequestLog
from clients.openai.responses import routes as responses
from clients.openai.responses.store import ResponseStore
from clients.openai.router import Router
from clients.openai.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from clients.openai.shim import OWNER, Shim, package_version
from clients.openai.stats import Stats
from clients.openai.stream import connected
from clients.openai.trace import trace_of
from clients.openai.wire import ModelInfo

if TYPE_CHECKING:
    from clients.openai.spans import ShimSpans

log = logging.getLogger("nereid.openai")


def create_app(config: ShimConfig, shared: str | None = None) -> ASGIApp:
    """The ASGI application. shared: a folder that the workers share when there are several."""
    metrics = ShimMetrics(shared)
    shim = Shim(config, Router(config, metrics), metrics)
    stats, probe = Stats(shim.router), Probe(shim.router)
    spans = _spans(config)
    requests = _request_log(config)
    kept = ResponseStore(config.stored_responses, Path(shared) / "responses" if shared else None)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await shim.router.start()
        try:
            yield
        finally:
            await stats.close()
            kept.close()
            if spans is not None:
                spans.close()
            if requests is not None:
                requests.close()
            await shim.router.close()

    app = FastAPI(
        title="Nereid",
        summary="The OpenAI API over a Triton model repository",
        version=package_version(),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.router.route_class = JsonRoute
    app.state.unknown_fields = UnknownFields(config.strict_fields)
    app.state.named = shim.router.named
    _errors(app)
    _api(app, shim)
    responses.add(app, shim, kept)
    _service(app, shim, stats, probe)
    if config.web:
        web.add(app)
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    gate: ASGIApp = Gate(app, paths, config, metrics, spans, requests)
    if config.cors_origins:
        gate = CORSMiddleware(
            gate,
            allow_origins=list(config.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # the OpenAI SDK for JavaScript sends a dozen of its own
            expose_headers=["X-Request-Id", "Retry-After", HEADER],
        )
    return gate


def _spans(config: ShimConfig) -> ShimSpans | None:
    if config.otlp_endpoint is None:
        return None
    from clients.openai.spans import ShimSpans  # here, so that the shim starts without the tracing extra

    return ShimSpans(config.otlp_endpoint, config.otlp_ratio)


def _request_log(config: ShimConfig) -> RequestLog | None:
    if config.request_log is None:
        return None
    return RequestLog(Path(config.request_log), config.request_log_bytes, config.request_log_texts)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api(http: Request, error: ApiError) -> Response:
        return error_response(error, http.scope)

    @app.exception_handler(BackendError)
    async def backend(http: Request, error: BackendError) -> Response:
        return error_response(error.to_api(prompt_field(http.url.path)), http.scope)

    @app.exception_handler(RequestValidationError)
    async def validation(http: Request, error: RequestValidationError) -> Response:
        return error_response(from_validation(error.errors()), http.scope)

    @app.exception_handler(ValidationError)
    async def translated(http: Request, error: ValidationError) -> Response:
        """A request of another API that chat does not take."""
        return error_response(from_validation(error.errors(include_url=False)), http.scope)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        if error.status_code == 400:
            message = f"The request body cannot be read as JSON: {error.detail}"
        response = error_response(ApiError(error.status_code, message), request.scope)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def unexpected(http: Request, error: Exception) -> Response:
        number = trace_of(http).request_id
        log.error("request %s failed", number, exc_info=error)
        sentence = f"The shim failed on this request; its log says why under the id {number}."
        return error_response(ApiError(500, sentence, code="internal"), http.scope)


def _api(app: FastAPI, shim: Shim) -> None:
    def card(name: str, info: ModelInfo) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": shim.started,
            "owned_by": OWNER,
            "root": info.name,
            "max_model_len": info.max_model_len,
            **listed(name, info, shim.started),
        }

    @app.post("/v1/completions", response_model=CompletionAnswer, responses=STREAMED, tags=["generate"])
    async def completions(http: Request, body: CompletionRequest) -> Response:
        return await complete(shim, http, body)

    @app.post("/v1/chat/completions", response_model=ChatAnswer, responses=STREAMED, tags=["generate"])
    async def chat_completions(http: Request, body: ChatRequest) -> Response:
        return await chat(shim, http, body)

    @app.post("/v1/messages", response_model=MessageAnswer, responses=MESSAGES, tags=["messages"])
    async def messages(http: Request, body: MessagesRequest) -> Response:
        return await create_message(shim, http, body)

    @app.post("/v1/messages/count_tokens", response_model=CountAnswer, responses=MESSAGES, tags=["messages"])
    async def message_tokens(http: Request, body: CountRequest) -> Response:
        return await count_tokens(shim, http, body)

    @app.get("/v1/models", response_model=ModelList, responses=ERRORS, tags=["models"])
    async def models() -> Response:
        served = shim.router.models
        served |= {name: served[target] for name, target in shim.router.aliases.items() if target in served}
        cards = [card(name, info) for name, info in sorted(served.items())]
        names = [each["id"] for each in cards]
        page = {"has_more": False, "first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return json_response({"object": "list", "data": cards, **page})

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=ERRORS, tags=["models"])
    async def model(model: str) -> Response:
        return json_response(card(model, shim.router.model(shim.router.named(model))))

    @app.post("/tokenize", response_model=Tokens, responses=ERRORS, tags=["text"])
    async def tokenize(http: Request, body: TokenizeRequest) -> Response:
        shim.check_template(body.chat_template)
        info = shim.router.model_or_only(body.model)
        async with connected(http.receive):
            ids = await tokenize_source(shim.router, info, body, ModelForms.of(shim.config, info))
            answer: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_model_len, "tokens": ids}
            if body.return_token_strs:
                answer["token_strs"] = await token_texts(shim.router, info, ids)
        return json_response(answer)

    @app.post("/detokenize", response_model=Words, responses=ERRORS, tags=["text"])
    async def detokenize(http: Request, body: DetokenizeRequest) -> Response:
        info = shim.router.model_or_only(body.model)
        async with connected(http.receive):
            text = await decode_ids(shim.router, info, body.tokens, body.skip_special_tokens is True)
        return json_response({"prompt": text})


def _service(app: FastAPI, shim: Shim, stats: Stats, probe: Probe) -> None:
    def served() -> dict[str, Any]:
        ready = shim.router.ready
        if not ready:
            raise ApiError(503, "No tritonserver with a ready model answers.", code="backend_unavailable")
        return {"status": "ok", "models": sorted(ready)}

    @app.get("/health", responses=ERRORS, tags=["service"], summary="200 while a replica serves a model")
    async def health() -> Response:
        return json_response(served())

    @app.get("/health/ready", responses=ERRORS, tags=["service"], summary="200 while a replica answers; as NVIDIA's")
    async def ready() -> Response:
        if not any(replica.answers for replica in shim.router.replicas):
            raise ApiError(503, "No tritonserver answers.", code="backend_unavailable")
        return json_response({"status": "ok"})

    sagemaker.add(app, shim, served)
    loading.add(app, shim)

    @app.get("/load", tags=["service"], summary="Generations that this worker has open")
    async def load() -> Response:
        return json_response({"server_load": sum(replica.open_requests for replica in shim.router.replicas)})

    @app.post("/reset_prefix_cache", responses=ERRORS, tags=["service"], summary="Empty the prefix caches; admin key")
    async def reset_prefix_cache(model: str | None = None) -> Response:
        name = None if model is None else shim.router.named(model)
        said = await shim.router.reset_prefix_caches(name)
        wrong = [f"{r}, {m}: {why}" for r, models in said.items() for m, why in models.items() if why != "ok"]
        if wrong:
            raise ApiError(503, f"Not every prefix cache was emptied. {'; '.join(wrong)}", code="reset_failed")
        return json_response({"status": "ok", "replicas": said})

    @app.get("/health/generate", responses=ERRORS, tags=["service"], summary="One real token from every model")
    async def health_generate() -> Response:
        results = await probe.run()
        failed = {name: result for name, result in results.items() if result != "ok"}
        if failed:
            raise ApiError(503, "; ".join(f"{n}: {r}" for n, r in failed.items()), code="generation_failed")
        return json_response({"status": "ok", "models": results})

    @app.get("/version", tags=["service"])
    async def version() -> Response:
        return json_response({"version": package_version()})

    @app.get("/stats", responses=ERRORS, tags=["service"], summary="Live gauges of every replica")
    async def live() -> Response:
        return json_response(await stats.body())

    @app.get(
        "/metrics",
        response_class=PlainTextResponse,
        tags=["service"],
        summary="The shim's own metrics, for Prometheus",
    )
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(shim.metrics.exposition(), media_type="text/plain; version=0.0.4")
