"""Settings of the OpenAI shim, as one frozen value. Flags fill it (`cli`), workers receive it whole."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from clients.openai.restrictions import Restriction, Restrictions
from engine.types import shown

ToolParser = Literal[
    "auto",
    "hermes",
    "qwen3-coder",
    "llama3",
    "pythonic",
    "mistral",
    "deepseek-v3",
    "deepseek-v3.1",
    "deepseek-v3.2",
    "kimi-k2",
    "gemma4",
    "functiongemma",
    "gpt-oss",
    "none",
]
ReasoningParser = Literal["auto", "think", "think-open", "mistral", "kimi", "gemma4", "gpt-oss", "none"]

_ADDRESS = re.compile(r"^(?P<dns>dns:)?(?P<host>\[[0-9a-fA-F:]+\]|[^:\s]+):(?P<grpc>\d+)(?::(?P<metrics>\d+))?$")

# As browsers write them; a port is left out that the scheme has anyway.
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::(?P<port>[1-9][0-9]{0,4}))?")
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class Replica(msgspec.Struct, frozen=True):
    """One tritonserver: its gRPC address and the page that serves its metrics.

    every_address: the name stands for all addresses it resolves to, each a tritonserver; it is looked up again at every
    health check, so that servers may come and go (a headless service of Kubernetes).
    """

    grpc: str
    metrics_url: str
    every_address: bool = False

    @classmethod
    def parse(cls, text: str) -> Replica:
        """`[dns:]HOST:GRPC_PORT[:METRICS_PORT]`; the metrics port defaults to 8002. Raises ValueError."""
        match = _ADDRESS.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not HOST:GRPC_PORT or HOST:GRPC_PORT:METRICS_PORT")
        host, metrics = match["host"], match["metrics"] or "8002"
        if not all(0 < int(port) <= 65535 for port in (match["grpc"], metrics)):
            raise ValueError(f"{text!r} holds a port that is not between 1 and 65535")
        url = f"http://{host}:{metrics}/metrics"
        return cls(grpc=f"{host}:{match['grpc']}", metrics_url=url, every_address=match["dns"] is not None)

    def at(self, address: str) -> Replica:
        """The replica at one of the addresses that this one's name stands for."""
        host = f"[{address}]" if ":" in address else address
        name = self.grpc.rsplit(":", 1)[0]
        return Replica(grpc=self.grpc.replace(name, host), metrics_url=self.metrics_url.replace(name, host))


class ShimConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the shim is told.

    replicas: tritonservers that hold the same models; a request goes to one of them.
    api_keys: accepted bearer keys; empty lets everyone in.
    restrictions: groups of endpoints that need a header of their own, in place of a key.
    admin_keys: keys of POST /reset_prefix_cache, /v1/models/{model}/load and /unload, refused without one.
    cors_origins: origins a browser may call from, as it writes them, or "*"; empty sends no CORS header.
    max_body_bytes: a larger request body gets 413.
    max_header_bytes: a longer request target and headers together get 431.
    header_timeout_s: headers that take longer get 408.
    max_concurrency_per_key: requests one key (or, without keys, one address) may have open in one worker; 0
        is no limit.
    max_choices: most prompts x n (or best_of) one request may ask for.
    request_timeout_s: deadline given to the engine when a request names none, and the most one may name.
    affinity: send equal prompt beginnings to the same replica while its load allows.
    affinity_slack: open requests a replica may be ahead of the least loaded one and still win by affinity.
    strict_fields: unknown fields of a request are refused, not reported.
    aliases: other names of models; a request for one goes to the model that it stands for.
    stored_responses: responses kept for `previous_response_id`, all workers together; 0 keeps none.
    trust_request_chat_template: a request may bring a chat template.
    generation_config: auto: a model's own generation_config.json has the sampling of requests that say nothing.
    otlp_endpoint: an OpenTelemetry collector, http://HOST:4318, that spans go to; None sends none.
    otlp_ratio: of requests that bring no trace of their own; those that do follow it.
    request_log: a file that gets a line of JSON for each POST; None: no file does.
    request_log_bytes: past so many it is moved to FILE.1. request_log_texts: with what people wrote.
    tool_parser, reasoning_parser: the forms that the models write tool calls and reasoning in; auto: each model's
        own, as its chat template shows it.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 9000
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    replicas: tuple[Replica, ...] = (Replica.parse("localhost:8001"),)
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    restrictions: tuple[Restriction, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 16 << 20
    max_header_bytes: Annotated[int, Meta(ge=1024)] = 64 << 10
    header_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0
    max_concurrency_per_key: Annotated[int, Meta(ge=0)] = 0
    max_choices: Annotated[int, Meta(ge=1)] = 256
    request_timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 600.0
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    tool_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"
    trust_request_chat_template: bool = False
    generation_config: Literal["auto", "none"] = "auto"
    otlp_endpoint: Annotated[str, Meta(pattern="^https?://[^/]+")] | None = None
    otlp_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    request_log: str | None = None
    request_log_bytes: Annotated[int, Meta(ge=1 << 20)] = 100 << 20
    request_log_texts: bool = False
    affinity: bool = True
    affinity_slack: Annotated[int, Meta(ge=0)] = 8
    health_interval_s: Annotated[float, Meta(gt=0)] = 2.0
    web: bool = True
    strict_fields: bool = False
    aliases: dict[str, str] = {}
    stored_responses: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000

    def __post_init__(self) -> None:
        if not self.replicas:
            raise ValueError("at least one tritonserver is needed: --triton HOST:GRPC_PORT[:METRICS_PORT]")
        if not self.host:
            raise ValueError("--host is empty: give an address, 0.0.0.0 for every one, or leave it out for 127.0.0.1")
        if self.request_log_texts and self.request_log is None:
            raise ValueError("--request-log-texts needs --request-log FILE")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both --tls-certificate and --tls-key")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-ca needs --tls-certificate and --tls-key")
        for origin in self.cors_origins:
            _check_origin(origin)
        if any(not key.strip() for key in (*self.api_keys, *self.admin_keys)):
            raise ValueError("an API key is empty")
        Restrictions(self.restrictions)


def _check_origin(origin: str) -> None:
    """Raises ValueError for what no browser sends as its Origin, and every one of them would be kept out by."""
    match = _ORIGIN.fullmatch(origin)
    if origin in ("*", "null") or (match and match["port"] != _DEFAULT_PORTS.get(match["scheme"], "")):
        return
    raise ValueError(
        f"--cors-origin {shown(origin)!r} is no origin that a browser has: give *, null or scheme://host[:port], in "
        "lower case, without a path, a / at its end, or the port that the scheme has anyway (https://chat.example)"
    )
