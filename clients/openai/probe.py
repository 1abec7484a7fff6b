"""GET /health/generate: one real token from every model, so that a stuck engine is noticed."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import aclosing

from clients.openai.errors import ApiError, BackendError
from clients.openai.router import Router
from clients.openai.wire import Generation, Prompt

_FRESH_S = 1.0
_TIMEOUT_S = 10.0
_FIRST = -(2**31)  # ahead of the queue


class Probe:
    """The endpoint needs no key, so it does at most one round a second, whoever asks."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._lock = asyncio.Lock()
        self._probed_at = -1e9
        self._result: dict[str, str] = {}

    async def run(self) -> dict[str, str]:
        """Model -> "ok" or what went wrong. Raises ApiError 503 when there is no model."""
        async with self._lock:
            if time.monotonic() - self._probed_at > _FRESH_S:
                names = sorted(self._router.models)
                results = await asyncio.gather(*(self._one(name) for name in names))
                self._result = dict(zip(names, results, strict=True))
                self._probed_at = time.monotonic()
        if not self._result:
            raise ApiError(503, "No model is ready.", code="backend_unavailable")
        return self._result

    async def _one(self, model: str) -> str:
        generation = Generation(
            model=model,
            request_id=f"probe-{uuid.uuid4().hex}",
            prompt=Prompt(ids=(0,)),
            sampling={"max_tokens": 1, "temperature": 0.0, "priority": _FIRST},
            stream=False,
            deadline=time.monotonic() + _TIMEOUT_S,
        )
        try:
            await asyncio.wait_for(self._drain(generation), _TIMEOUT_S)
        except BackendError as error:
            return error.message
        except asyncio.TimeoutError:
            return f"no token within {_TIMEOUT_S:g} seconds"
        return "ok"

    async def _drain(self, generation: Generation) -> None:
        async with aclosing(self._router.generate(generation)) as pieces:
            async for _ in pieces:
                pass
