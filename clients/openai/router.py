"""Which replica gets a request: prefix affinity, then the least loaded; health checks; retry before the first token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TypeVar

from clients.openai.config import Replica, ShimConfig
from clients.openai.errors import ApiError, BackendError
from clients.openai.metrics import ShimMetrics
from clients.openai.triton import TritonReplica
from clients.openai.wire import Generation, ModelInfo, Piece

log = logging.getLogger("nereid.openai")

T = TypeVar("T")

# A replica that answers no check in time, though it has answered one so lately, is busy or stands still for a moment.
_PATIENCE_S = 10.0
_ATTEMPTS = 6  # for a request that meets dead instances only: each takes a second to say so


class PrefixIndex:
    """Which replica last saw a prompt beginning: chained hashes of fixed chunks, of which the half that was used latest
    stays, at least.

    chunk: bytes hashed together; an entry stands for the whole prompt up to its chunk's end. An entry takes some 120
    bytes, half of what an OrderedDict would.
    """

    def __init__(self, chunk: int = 256, capacity: int = 65536) -> None:
        self._chunk = chunk
        self._half = capacity // 2
        self._latest: dict[int, str] = {}
        self._before: dict[int, str] = {}

    def find(self, key: bytes) -> str | None:
        """The replica with the longest known beginning of `key`."""
        owner = None
        for digest in self._digests(key):
            known = self._latest.get(digest) or self._before.get(digest)
            if known is None:
                break
            self._put(digest, known)
            owner = known
        return owner

    def add(self, key: bytes, replica: str) -> None:
        for digest in self._digests(key):
            self._put(digest, replica)

    def _put(self, digest: int, replica: str) -> None:
        self._latest[digest] = replica
        self._before.pop(digest, None)
        if len(self._latest) >= self._half:
            self._latest, self._before = {}, self._latest

    def forget(self, replica: str) -> None:
        """The replica restarted: its cache is empty."""
        for owners in (self._latest, self._before):
            for digest in [d for d, owner in owners.items() if owner == replica]:
                del owners[digest]

    def __len__(self) -> int:
        return len(self._latest) + len(self._before)

    def clear(self) -> None:
        """Every cache is empty."""
        self._latest.clear()
        self._before.clear()

    def _digests(self, key: bytes) -> Iterable[int]:
        # A short key (a prompt_cache_key) is one chunk; of a long one, only whole chunks count.
        digest = b""
        end = max(len(key) - len(key) % self._chunk, min(len(key), self._chunk))
        for start in range(0, end, self._chunk):
            digest = blake2b(digest + key[start : start + self._chunk], digest_size=8).digest()
            yield int.from_bytes(digest, "big")


@dataclass
class ReplicaState:
    """A replica and what the router knows of it."""

    server: TritonReplica
    models: dict[str, ModelInfo] = field(default_factory=dict)
    waited: frozenset[str] = frozenset()  # models that it is loading or could not load
    healthy: bool = False
    answers: bool = False  # though it may have no model that is ready
    open_requests: int = 0
    problem: str = ""  # why it is not healthy
    leaving: bool = False  # its address is gone: it ends what it has open and gets nothing new
    late: bool = False  # the last check had no answer in time
    answered_at: float = -math.inf  # when a check was last answered, by the monotonic clock

    @property
    def name(self) -> str:
        return self.server.address.grpc

    @property
    def slow(self) -> bool:
        """Whether it may still answer, later than a healthy one: requests go there rather than nowhere."""
        return self.late and not self.leaving and time.monotonic() - self.answered_at < _PATIENCE_S

    @property
    def ready(self) -> frozenset[str]:
        """Models that would answer a request at once."""
        return frozenset(name for name, info in self.models.items() if self.healthy and not info.problem)


class Router:
    """Sends generations to replicas. `start` before use, inside the event loop; `close` after."""

    def __init__(self, config: ShimConfig, metrics: ShimMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._prefixes = PrefixIndex()
        self._watch: asyncio.Task[None] | None = None
        self.replicas: list[ReplicaState] = []

    async def start(self) -> None:
        await self.check()
        for replica in self.replicas:
            if not replica.healthy:
                log.warning("replica %s is not ready: %s", replica.name, replica.problem)
        if not self.replicas:
            log.warning("no replica: none of %s resolves", ", ".join(r.grpc for r in self._config.replicas))
        self._watch = asyncio.create_task(self._check_forever())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        for replica in self.replicas:
            await replica.server.close()

    @property
    def models(self) -> dict[str, ModelInfo]:
        """Models of all healthy replicas."""
        return {name: info for replica in self.replicas if replica.healthy for name, info in replica.models.items()}

    @property
    def ready(self) -> frozenset[str]:
        """Models that a replica would answer at once for."""
        return frozenset().union(*(replica.ready for replica in self.replicas))

    @property
    def aliases(self) -> dict[str, str]:
        """Other names of models, as the shim was told and as the models say: what it was told comes first, and a
        model's own name before other names."""
        models = self.models
        said = {name: own for own in sorted(models, reverse=True) for name in models[own].served_names}
        return {name: own for name, own in said.items() if name not in models} | self._config.aliases

    def named(self, name: str) -> str:
        """The model's own name."""
        if name in self._config.aliases:
            return self._config.aliases[name]
        if any(name in replica.models for replica in self.replicas):
            return name
        return self.aliases.get(name, name)

    def model(self, name: str) -> ModelInfo:
        """Raises ApiError 404 for a model that nobody has loaded, 503 when it is being loaded or no replica answers."""
        if serving := self._serving(name):
            return serving[0].models[name]
        answering = [replica for replica in self.replicas if replica.answers]
        if not answering:
            raise ApiError(503, "No tritonserver is ready; try again in a moment.", code="backend_unavailable")
        if any(name in replica.waited for replica in answering):
            sentence = f"The model `{name}` is not ready; try again in a moment."
            raise ApiError(503, sentence, param="model", code="model_not_ready")
        known = ", ".join(sorted(self.models)) or "none"
        raise ApiError(
            404, f"The model `{name}` does not exist. Models here: {known}.", param="model", code="model_not_found"
        )

    def model_or_only(self, name: str | None) -> ModelInfo:
        """The model of that name; without one, the model when there is one only. Raises ApiError."""
        if name is None and len(self.models) > 1:
            raise ApiError(
                400,
                f"Several models are served: name one in `model` ({', '.join(sorted(self.models))}).",
                param="model",
                code="missing_required_parameter",
            )
        return self.model(next(iter(self.models), "") if name is None else name)

    def pick(self, model: str, key: bytes, without: Collection[str] = ()) -> ReplicaState:
        """The replica for a prompt. Raises BackendError UNAVAILABLE when none is left."""
        able = self._able(model, without)
        if not able:
            raise BackendError("UNAVAILABLE", f"No replica can serve the model `{model}` now; try again in a moment.")
        best = min(able, key=lambda r: r.open_requests)
        if self._config.affinity and len(self.replicas) > 1:
            key = model.encode() + b"\0" + key
            owner = self._prefixes.find(key)
            for replica in able:
                if replica.name == owner and replica.open_requests <= best.open_requests + self._config.affinity_slack:
                    best = replica
            self._prefixes.add(key, best.name)
        return best

    async def generate(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """Pieces from one replica; another is tried only while nothing has come. Raises BackendError."""
        tried: list[str] = []
        attempts = 0
        while True:
            attempts += 1
            replica = self.pick(generation.model, generation.prompt.key, tried)
            started = False
            replica.open_requests += 1
            try:
                async with aclosing(replica.server.generate(generation)) as pieces:
                    async for piece in pieces:
                        started = True
                        yield piece
                return
            except BackendError as error:
                tried.append(replica.name)
                if started or not self._goes_on(generation.model, tried, error, attempts):
                    if not error.refused:
                        log.warning("request %s failed on %s: %s", generation.request_id, replica.name, error.detail)
                    raise
                self._metrics.retries.inc()
                log.warning("request %s moves off %s: %s", generation.request_id, replica.name, error.detail)
            finally:
                replica.open_requests -= 1

    async def ask(self, model: str, call: Callable[[TritonReplica], Awaitable[T]]) -> T:
        """One short call (tokenize, detokenize) to any replica with the model. Raises BackendError."""
        tried: list[str] = []
        attempts = 0
        while True:
            attempts += 1
            able = self._able(model, tried)
            if not able:
                raise BackendError("UNAVAILABLE", f"No replica can serve the model `{model}` now.")
            replica = min(able, key=lambda r: r.open_requests)
            try:
                return await call(replica.server)
            except BackendError as error:
                tried.append(replica.name)
                if not self._goes_on(model, tried, error, attempts):
                    raise

    async def reset_prefix_caches(self, model: str | None) -> dict[str, dict[str, str]]:
        """Empty the prefix cache of a model, or of all models, on every replica. Returns what each replica said of each
        model: "ok", or why not. Raises ApiError when nobody has the model."""
        if model is not None or not self.models:
            self.model(model or "")

        async def one(server: TritonReplica, info: ModelInfo) -> str:
            if not info.resets:
                return "its entry in the model repository is older than this: write it again with `nereid add`"
            try:
                await server.reset_prefix_cache(info.name)
            except BackendError as error:
                return error.message
            return "ok"

        said: dict[str, dict[str, str]] = {}
        for replica in self.replicas:
            if not replica.healthy:
                said[replica.name] = {"*": replica.problem or "it is going away"}
                continue
            infos = [info for name, info in replica.models.items() if model in (None, name)]
            results = await asyncio.gather(*(one(replica.server, info) for info in infos))
            said[replica.name] = {info.name: result for info, result in zip(infos, results, strict=True)}
        self._prefixes.clear()
        return said

    def _able(self, model: str, without: Collection[str]) -> list[ReplicaState]:
        """Replicas that serve the model now, but for those of these names. Where each waits for its engine, a request
        may wait at any of them."""
        able = self._serving(model, without)
        return [r for r in able if model in r.ready] or able

    def _serving(self, model: str, without: Collection[str] = ()) -> list[ReplicaState]:
        """Healthy replicas that have the model, or else slow ones, but for those of these names."""
        able = [r for r in self.replicas if model in r.models and r.name not in without]
        return [r for r in able if r.healthy] or [r for r in able if r.slow]

    def _goes_on(self, model: str, tried: list[str], error: BackendError, attempts: int) -> bool:
        """Whether a replica is left to try after an error. All are when only an instance of the last one has died."""
        if self._able(model, tried):
            return error.retryable
        if error.again and attempts < _ATTEMPTS:
            tried.clear()
            return True
        return False

    async def check(self) -> None:
        """Ask every replica whether it is ready and what it serves."""
        await self._look_up()
        await asyncio.gather(*(self._check_one(replica) for replica in self.replicas if not replica.leaving))

    async def _look_up(self) -> None:
        """Keep one state for every address there is now. A server whose name is gone ends its open requests first."""
        wanted: dict[str, Replica] = {}
        for replica in self._config.replicas:
            if replica.every_address:
                wanted.update({one.grpc: one for one in await _addresses(replica)})
            else:
                wanted[replica.grpc] = replica
        known = {state.name for state in self.replicas}
        self.replicas += [ReplicaState(TritonReplica(one)) for name, one in wanted.items() if name not in known]
        for state in [s for s in self.replicas if s.name not in wanted]:
            state.healthy, state.answers, state.leaving = False, False, True
            if state.open_requests == 0:
                self.replicas.remove(state)
                self._prefixes.forget(state.name)
                self._metrics.replica_up.remove(state.name)
                await state.server.close()

    async def _check_one(self, replica: ReplicaState) -> None:
        try:
            before = replica.models
            replica.models, replica.waited = await replica.server.models()
            replica.problem = "" if replica.models else "it answers, but no model is ready"
        except BackendError as error:
            replica.problem = f"it does not answer ({error.detail})"
            replica.answers, replica.late = False, error.code == "DEADLINE_EXCEEDED"
        else:
            replica.answers, replica.late, replica.answered_at = True, False, time.monotonic()
            _tell(replica, before)
        healthy = not replica.problem
        if healthy and not replica.healthy:
            log.info("replica %s is ready", replica.name)
            self._prefixes.forget(replica.name)
        elif replica.healthy and not healthy:
            log.warning("replica %s is not ready: %s", replica.name, replica.problem)
        replica.healthy = healthy
        self._metrics.replica_up.labels(replica.name).set(bool(replica.ready))

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            try:
                await self.check()
            except Exception:
                log.exception("the health check failed")


def _tell(replica: ReplicaState, before: Mapping[str, ModelInfo]) -> None:
    """A line where a model began to wait for its engine, or has it again."""
    for name, info in replica.models.items():
        had = before[name].problem if name in before else ""
        if info.problem and not had:
            log.warning("replica %s: %s is not ready: %s", replica.name, name, info.problem)
        elif had and not info.problem:
            log.info("replica %s: %s is ready", replica.name, name)


async def _addresses(replica: Replica) -> list[Replica]:
    """The replicas behind a name; none while it does not resolve."""
    host, port = replica.grpc.rsplit(":", 1)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [replica.at(str(address)) for address in sorted({entry[4][0] for entry in found})]
