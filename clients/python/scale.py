"""`nereid scale`: another number of frontends for a loaded model, while its requests run."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from engine.serving.launch.repository import frontend_groups

_ASK_S = 10.0
_LOAD_S = 300.0  # a new frontend may wait for an engine process that starts again


class ScaleError(Exception):
    """The number of frontends cannot be changed; the message says why."""


def scale(url: str, model: str, frontends: int) -> int:
    """Give `model` of the server at `url` (host:port of its gRPC) so many frontends; returns how many it had.

    The server starts a second set of frontends, which join the engine process that runs, and ends the first when its
    last request is done. config.pbtxt stays as it is. Raises ScaleError.
    """
    with InferenceServerClient(url) as server:
        try:
            message = server.get_model_config(model, client_timeout=_ASK_S)
            config = MessageToDict(message.config, preserving_proto_field_name=True)
            had = _frontends(model, config)
            if had != frontends:
                server.load_model(model, config=json.dumps(_scaled(config, frontends)), client_timeout=_LOAD_S)
        except InferenceServerException as error:
            raise ScaleError(f"{url} does not do it for the model {model}: {error.message()}") from None
    return had


def _frontends(model: str, config: dict[str, Any]) -> int:
    groups = config.get("instance_group", [])
    if not groups or any(group.get("kind") != "KIND_MODEL" for group in groups):
        raise ScaleError(f"{model} has no frontends: name an LLM model, and not its tokenizer or an ensemble over it")
    return sum(group.get("count", 1) for group in groups)


def _scaled(config: dict[str, Any], frontends: int) -> dict[str, Any]:
    """With the tag, more than groups differs: 2.51 carries that out by a second set of instances, where it would take
    instances away in the midst of their streams."""
    tags = {**config.get("metric_tags", {}), "frontends": str(frontends)}
    return {**config, "instance_group": frontend_groups(frontends), "metric_tags": tags}
