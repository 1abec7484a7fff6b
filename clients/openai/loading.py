"""POST /v1/models/{model}/load and /unload: Triton's model repository, the same on every replica."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from clients.openai.answers import ERRORS
from clients.openai.encode import json_response
from clients.openai.errors import ApiError, BackendError, invalid
from clients.openai.shim import OWNER, Shim
from clients.openai.triton import TritonReplica

_LOAD_S = 3600.0  # weights of hundreds of gigabytes come from a disk
_LOOK_S = 0.1
_READY, _UNLOADED = "READY", ("UNAVAILABLE", "")


class Loading:
    """Loads and unloads of one name follow one another in this process. Names are those of the repository alone."""

    def __init__(self, shim: Shim) -> None:
        self._shim = shim
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def load(self, model: str) -> list[str]:
        """Returns the replicas that have loaded it. Raises ApiError: 404 for a name that no repository has, 400 when it
        is loaded everywhere, 500 with the server's reason."""
        await self._states(model)
        async with self._turns[model]:
            states = await self._states(model)
            waiting = [server for server, state in states.items() if state != _READY]
            if not waiting:
                raise ApiError(400, f"The model `{model}` is already loaded.", param="model", code="already_loaded")
            return await self._each(waiting, lambda server: server.load(model, _LOAD_S))

    async def unload(self, model: str) -> list[str]:
        """Returns the replicas that have unloaded it: their requests have ended. Raises ApiError: 404, 400 when it is
        loaded nowhere, 500 with the server's reason."""
        await self._states(model)
        async with self._turns[model]:
            states = await self._states(model)
            loaded = [server for server, state in states.items() if state not in _UNLOADED]
            if not loaded:
                raise ApiError(400, f"The model `{model}` is not loaded.", param="model", code="not_loaded")
            return await self._each(loaded, lambda server: self._unloaded(server, model))

    async def _states(self, model: str) -> dict[TritonReplica, str]:
        """The model's state at each replica whose repository has it. Raises ApiError 400, 404, 503."""
        if model.isspace() or model in (".", ".."):
            raise invalid("model", "the path holds no name of a model.")
        servers = [replica.server for replica in self._shim.router.replicas if not replica.leaving]
        found = await asyncio.gather(*(server.repository() for server in servers), return_exceptions=True)
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, BackendError):
                raise answer
        if not any(isinstance(answer, dict) for answer in found):
            raise ApiError(503, "No tritonserver answers; try again in a moment.", code="backend_unavailable")
        states = {s: a[model] for s, a in zip(servers, found, strict=True) if isinstance(a, dict) and model in a}
        if not states:
            sentence = f"The model repository holds no model `{model}`."
            raise ApiError(404, sentence, param="model", code="model_not_found")
        return states

    async def _each(self, servers: list[TritonReplica], call: Any) -> list[str]:
        """Call all at once and look at what is served now. Raises ApiError 500 when one of them fails."""
        failures = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
        await self._shim.router.check()
        names = [server.address.grpc for server in servers]
        wrong = [f"{name}: {why}" for name, why in zip(names, failures, strict=True) if why is not None]
        if wrong:
            raise ApiError(500, "; ".join(wrong), code="load_failed")
        return names

    async def _unloaded(self, server: TritonReplica, model: str) -> None:
        await server.unload(model)
        end = time.monotonic() + _LOAD_S
        while (await server.repository()).get(model, "") not in _UNLOADED:
            if time.monotonic() > end:
                raise BackendError("DEADLINE_EXCEEDED", "its requests have not ended")
            await asyncio.sleep(_LOOK_S)


def add(app: FastAPI, shim: Shim) -> None:
    loading = Loading(shim)

    @app.post("/v1/models/{model:path}/load", include_in_schema=False)  # served names may hold slashes
    @app.post("/v1/models/{model}/load", responses=ERRORS, tags=["models"], summary="Load it everywhere; admin key")
    async def load(model: str) -> Response:
        name = shim.router.named(model)
        replicas = await loading.load(name)
        card = {"id": name, "object": "model", "created": shim.started, "owned_by": OWNER}
        return json_response({**card, "replicas": replicas})

    @app.post("/v1/models/{model:path}/unload", include_in_schema=False)  # served names may hold slashes
    @app.post("/v1/models/{model}/unload", responses=ERRORS, tags=["models"], summary="Unload it everywhere; admin key")
    async def unload(model: str) -> Response:
        name = shim.router.named(model)
        return json_response({"status": "success", "model": name, "replicas": await loading.unload(name)})
