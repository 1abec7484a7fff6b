"""What the endpoints share: settings, router, metrics, and how an answer is labelled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from clients.openai.config import ShimConfig
from clients.openai.errors import invalid, unsupported
from clients.openai.metrics import ShimMetrics
from clients.openai.router import Router
from clients.openai.trace import Trace
from clients.openai.usage import Usage
from clients.openai.wire import ModelInfo, Piece

OWNER = "Triton Inference Server"  # of every model, as NVIDIA's frontend says


def package_version() -> str:
    try:
        return version("nereid")
    except PackageNotFoundError:
        return "0+source"


@dataclass(frozen=True)
class Shim:
    config: ShimConfig
    router: Router
    metrics: ShimMetrics
    started: int = field(default_factory=lambda: int(time.time()))  # Unix time: Triton does not say when a model came

    def defaults(self, info: ModelInfo) -> Mapping[str, Any]:
        """Sampling of a model's own, for requests that say nothing."""
        return info.sampling if self.config.generation_config == "auto" else {}

    def check_template(self, template: str | None) -> None:
        """Raises ApiError for a request's own chat template where none is taken."""
        if template is not None and not self.config.trust_request_chat_template:
            why = "this server takes none from requests: start it with --trust-request-chat-template."
            raise unsupported("chat_template", why)

    def check_choices(self, count: int) -> None:
        if count > self.config.max_choices:
            raise invalid(
                "n", f"the request asks for {count} generations (prompts x n); at most {self.config.max_choices} here."
            )

    def account(self, trace: Trace, usage: Usage, piece: Piece) -> None:
        """Count a piece that came."""
        trace.token_came()
        usage.add(piece)
        self.metrics.relayed(len(piece.token_ids))


@dataclass(frozen=True)
class Label:
    """The fields that an answer and each of its chunks begin with."""

    answer_id: str
    kind: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, request_id: str) -> Label:
        return cls(f"{prefix}-{request_id}", kind, int(time.time()), model)

    def body(self, choices: Sequence[dict[str, Any]], kind: str | None = None) -> dict[str, Any]:
        return {
            "id": self.answer_id,
            "object": kind or self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
