"""A typed client of a running server, over tritonclient's gRPC.

    from clients.python import Client, SamplingParams

    with Client("localhost:8001", model="demo") as client:
        for chunk in client.stream("Once upon a time", SamplingParams(max_tokens=32)):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods for asyncio.
"""

from clients.python.aio import AsyncClient
from clients.python.sync import Client
from clients.python.wire import Chunk, Completion, ServerError
from engine.types import SamplingParams

__all__ = ["AsyncClient", "Chunk", "Client", "Completion", "SamplingParams", "ServerError"]
