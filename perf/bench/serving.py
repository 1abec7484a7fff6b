"""Load on a running server, measured at the client: Triton over gRPC streaming, or any OpenAI completions URL.

    python -m perf.bench.serving --grpc 127.0.0.1:8001 --model demo c=8:n=64:in=128:out=64
    python -m perf.bench.serving --openai http://127.0.0.1:8000 q=4:n=60:in=128:out=64 --processes 4 --json out.jsonl

Each spec (see `perf.workload`) is one point; a spec that names no seed gets a fresh one. Prompts and outputs are token
ids, to exactly `out` tokens. Every request has a stream of its own. Events are stored as they come and parsed
after the last, so that parsing costs no measured time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from perf.provenance import provenance
from perf.workload import Answer, Request, Spec, parse, requests, summary, warm_requests

Raw = tuple[float, bytes]


class Transport(Protocol):
    """How a request reaches a server, and what its events mean."""

    async def open(self) -> None: ...

    def encode(self, request: Request) -> bytes: ...

    async def send(self, body: bytes) -> tuple[list[Raw], str | None]: ...

    async def close(self) -> None: ...

    def tokens(self, event: bytes) -> tuple[list[int] | int, str | None]: ...


class GrpcTransport:
    """Triton's ModelStreamInfer: one stream a request, `input_ids` in, `token_ids` out."""

    def __init__(self, address: str, model: str) -> None:
        self.address = address
        self.model = model

    async def open(self) -> None:
        import grpc.aio

        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._channel = grpc.aio.insecure_channel(self.address, options=options)
        # bytes in and bytes out: messages are built before and parsed after the run
        self._call = self._channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")

    def encode(self, request: Request) -> bytes:
        import numpy
        from tritonclient.grpc import service_pb2

        ids = numpy.asarray(request.prompt, dtype=numpy.int32)
        sampling = json.dumps({"max_tokens": request.output, "ignore_eos": True, **request.sampling}).encode()
        message = service_pb2.ModelInferRequest(model_name=self.model)
        for name, dtype, shape, raw in (
            ("input_ids", "INT32", [len(ids)], ids.tobytes()),
            ("stream", "BOOL", [1], b"\x01"),
            ("sampling_parameters", "BYTES", [1], len(sampling).to_bytes(4, "little") + sampling),
        ):
            message.inputs.add(name=name, datatype=dtype, shape=shape)
            message.raw_input_contents.append(raw)
        message.outputs.add(name="token_ids")
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        return bytes(message.SerializeToString())

    async def send(self, body: bytes) -> tuple[list[Raw], str | None]:
        import grpc

        events: list[Raw] = []
        call = self._call()
        try:
            await call.write(body)
            await call.done_writing()
            while True:
                event = await call.read()
                if event is grpc.aio.EOF:
                    return events, None
                events.append((time.perf_counter(), event))
        except grpc.aio.AioRpcError as problem:
            return events, f"{problem.code().name}: {problem.details()}"

    async def close(self) -> None:
        await self._channel.close()

    def tokens(self, event: bytes) -> tuple[list[int] | int, str | None]:
        import numpy
        from tritonclient.grpc import service_pb2

        message = service_pb2.ModelStreamInferResponse.FromString(event)
        if message.error_message:
            return 0, message.error_message
        answer = message.infer_response
        for output, raw in zip(answer.outputs, answer.raw_output_contents, strict=False):
            if output.name == "token_ids":
                return numpy.frombuffer(raw, dtype=numpy.int32).tolist(), None
        return 0, None


class OpenAiTransport:
    """An OpenAI server's /v1/completions with a token-id prompt, as server-sent events."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/") + "/v1/completions"
        self.model = model

    async def open(self) -> None:
        import aiohttp

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=600), read_bufsize=1 << 20
        )

    def encode(self, request: Request) -> bytes:
        body = {
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.output,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
            **request.sampling,
        }
        return json.dumps(body).encode()

    async def send(self, body: bytes) -> tuple[list[Raw], str | None]:
        import aiohttp

        events: list[Raw] = []
        try:
            headers = {"Content-Type": "application/json"}
            async with self._session.post(self.url, data=body, headers=headers) as reply:
                if reply.status != 200:
                    return events, f"HTTP {reply.status}: {(await reply.text())[:300]}"
                rest = b""
                async for chunk in reply.content.iter_any():
                    now = time.perf_counter()
                    *lines, rest = (rest + chunk).split(b"\n")
                    events += [(now, line) for line in lines if line.startswith(b"data:")]
        except (aiohttp.ClientError, asyncio.TimeoutError) as problem:
            return events, f"{type(problem).__name__}: {problem}"
        return events, None

    async def close(self) -> None:
        await self._session.close()

    def tokens(self, event: bytes) -> tuple[list[int] | int, str | None]:
        text = event[5:].strip()
        if text == b"[DONE]":
            return 0, None
        reply = json.loads(text)
        if reply.get("error"):
            return 0, str(reply["error"])[:300]
        if reply.get("choices"):
            choice = reply["choices"][0]
            # a last event that carries nothing but a finish reason is no token
            if choice.get("token_ids"):
                return list(choice["token_ids"]), None
            return (1 if choice.get("text") or not choice.get("finish_reason") else 0), None
        usage = reply.get("usage") or {}
        return -int(usage.get("completion_tokens", 0)), None


def digest(
    transport: Transport, request: Request, sent: float, ended: float, raw: list[Raw], error: str | None
) -> Answer:
    """An answer from stored events. A negative token count is the server's own total."""
    times, count, ids, total = [], 0, [], None
    for at, event in raw:
        tokens, problem = transport.tokens(event)
        error = error or problem
        if isinstance(tokens, list):
            ids += tokens
            tokens = len(tokens)
        if tokens < 0:
            total = -tokens
        elif tokens:
            times.append(at)
            count += tokens
    if not times and error is None:
        error = "the stream ended without a token"
    return Answer(len(request.prompt), request.output, sent, ended, times, total or count, error, tuple(ids))


async def _run(
    transport: Transport,
    share: list[Request],
    warm: list[Request],
    limit: int | None,
    ready: Callable[[], Awaitable[float]],
) -> list[Answer]:
    await transport.open()
    for request in warm:
        await transport.send(transport.encode(request))
    bodies = [transport.encode(request) for request in share]
    stored: list[tuple[float, float, list[Raw], str | None]] = [(0.0, 0.0, [], "never sent")] * len(share)
    gate = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()

    async def one(index: int) -> None:
        async with gate:
            sent = time.perf_counter()
            events, error = await transport.send(bodies[index])
            stored[index] = (sent, time.perf_counter(), events, error)

    start = await ready()
    tasks = []
    for index, request in enumerate(share):
        wait = start + request.at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(index)))
    await asyncio.gather(*tasks)
    await transport.close()
    return [digest(transport, request, *stored[i]) for i, request in enumerate(share)]


def _client(
    transport: Transport, share: list[Request], warm: list[Request], limit: int | None, barrier: Any, results: Any
) -> None:
    with contextlib.suppress(ImportError):
        import uvloop

        if not isinstance(transport, GrpcTransport):
            uvloop.install()

    async def ready() -> float:
        barrier.wait()
        return time.perf_counter() + 0.05

    try:
        results.put(asyncio.run(_run(transport, share, warm, limit, ready)))
    except Exception as problem:
        text = f"client failed: {type(problem).__name__}: {problem}"
        barrier.abort()
        results.put([Answer(len(r.prompt), r.output, 0.0, 0.0, [], 0, text) for r in share])


def measure(
    transport: Transport, spec: Spec, processes: int, low: int, high: int, texts: Sequence[list[int]] = ()
) -> tuple[dict[str, Any], list[Answer]]:
    """Runs one spec from `processes` client processes, and sums it up. texts: see `perf.workload.requests`."""
    made, warm = requests(spec, low, high, texts), warm_requests(spec, low, high)
    # Each process keeps the same number in flight, so that none runs out of requests before the others.
    most = max(1, min(processes, spec.in_flight or processes, len(made)))
    processes = max(p for p in range(1, most + 1) if spec.in_flight is None or spec.in_flight % p == 0)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(processes), context.Queue()
    clients = []
    for i in range(processes):
        limit = None if spec.in_flight is None else spec.in_flight // processes
        task = (transport, made[i::processes], warm if i == 0 else [], limit, barrier, results)
        clients.append(context.Process(target=_client, args=task))
    before = os.times()
    for client in clients:
        client.start()
    answers = [answer for _ in clients for answer in results.get()]
    for client in clients:
        client.join()
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return summary(spec, answers) | {"processes": processes, "client_cpu_s": round(spent, 2)}, answers


def publish(
    figures: Mapping[str, Any], spec: Spec, answers: Sequence[Answer], json_file: str | None, ids_file: str | None
) -> None:
    """Print a result with its provenance as one JSON line; append it, and the answers' ids, to the files given."""
    line = json.dumps({**figures, **provenance()})
    print(line, flush=True)
    if json_file:
        with open(json_file, "a") as file:
            file.write(line + "\n")
    if ids_file:
        with open(ids_file, "a") as file:
            file.write(json.dumps({"spec": spec.text, "ids": sorted(a.ids for a in answers)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--grpc", metavar="HOST:PORT", help="Triton's gRPC address")
    server.add_argument("--openai", metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument("specs", nargs="+", metavar="SPEC")
    parser.add_argument("--model", required=True, help="the model's name on the server")
    parser.add_argument("--label", default="", help="written into each result")
    parser.add_argument("--low", type=int, default=1000, help="smallest token id of a prompt")
    parser.add_argument("--high", type=int, default=100_000, help="token ids of a prompt stay below this")
    parser.add_argument("--processes", type=int, default=4, help="client processes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first spec; each later one gets the next")
    parser.add_argument("--json", metavar="FILE", help="append the results to this file, one JSON line each")
    parser.add_argument(
        "--ids", metavar="FILE", help="write every answer's token ids to this file (to compare servers)"
    )
    args = parser.parse_args()
    transport: Transport
    transport = GrpcTransport(args.grpc, args.model) if args.grpc else OpenAiTransport(args.openai, args.model)
    try:
        specs = [parse(text, args.seed + i) for i, text in enumerate(args.specs)]
    except ValueError as problem:
        parser.error(str(problem))
    failed = 0
    for spec in specs:
        figures, answers = measure(transport, spec, args.processes, args.low, args.high)
        via = "grpc" if args.grpc else "openai"
        publish({"label": args.label, "via": via, **figures}, spec, answers, args.json, args.ids)
        failed += figures["failed"]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
