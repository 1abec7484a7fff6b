"""`python -m clients.openai` and `nereid openai`: flags to a ShimConfig."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from clients.openai.config import Replica, ShimConfig
from clients.openai.restrictions import Restriction
from engine import files
from engine.plain import plain


@dataclass(frozen=True, slots=True)
class Flags:
    """The command's flags."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9000
    workers: Annotated[int, typer.Option(help="Processes that share the port.")] = 1
    triton: Annotated[
        list[str] | None,
        typer.Option(
            help="A tritonserver, HOST:GRPC_PORT[:METRICS_PORT]; give it once a replica. dns:HOST:... stands for every "
            "address of HOST, looked up again all the time."
        ),
    ] = None
    api_key: Annotated[list[str] | None, typer.Option(help="A key clients must send; give it once a key.")] = None
    api_key_file: Annotated[Path | None, typer.Option(help="A file with one key a line.")] = None
    admin_key: Annotated[
        list[str] | None,
        typer.Option(help="A key for POST /reset_prefix_cache and for loading models, which need one; once a key."),
    ] = None
    openai_restricted_api: Annotated[
        list[str] | None,
        typer.Option(
            help="GROUP[,GROUP...]:HEADER=VALUE: endpoints of these groups (inference, model-repository, metrics, "
            "health) are for requests with this header; once a header. NVIDIA's frontend has the same in three words."
        ),
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="An origin browsers may call from: scheme://host[:port], null for pages of files, or * for all."
        ),
    ] = None
    max_body_bytes: Annotated[int, typer.Option(help="Larger request bodies get 413.")] = 16 << 20
    max_header_bytes: Annotated[int, typer.Option(help="Longer request headers get 431.")] = 64 << 10
    header_timeout: Annotated[float, typer.Option(help="Headers that take more seconds to come get 408.")] = 10.0
    max_concurrency_per_key: Annotated[
        int, typer.Option(help="Open requests a key may have in one worker; 0 is no limit.")
    ] = 0
    max_choices: Annotated[int, typer.Option(help="Most generations (prompts x n) a request may ask for.")] = 256
    request_timeout: Annotated[float, typer.Option(help="Longest a request may take, in seconds.")] = 600.0
    tls_certificate: Annotated[Path | None, typer.Option(help="PEM file; serves HTTPS.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None
    tls_client_ca: Annotated[Path | None, typer.Option(help="PEM file; clients must show a certificate of it.")] = None
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How models write tool calls: auto, as each one's chat template shows; hermes, qwen3-coder, llama3, "
            "pythonic, mistral, deepseek-v3, deepseek-v3.1, deepseek-v3.2 (V4 too), kimi-k2, gemma4, functiongemma, "
            "gpt-oss or none."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="auto: as each model's chat template shows; think: <think>, opened by prompt or answer; "
            "think-open: answers begin within it; mistral: [THINK]; kimi: ◁think▷; gemma4: its channel; gpt-oss: "
            "harmony's channels; none."
        ),
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Requests may bring a chat template of their own.")
    ] = False
    generation_config: Annotated[
        str, typer.Option(help="auto: a model's generation_config.json has its default sampling; none: the API's own.")
    ] = "auto"
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="An OpenTelemetry collector (http://HOST:4318) that spans of requests go to.")
    ] = None
    otlp_ratio: Annotated[float, typer.Option(help="Share of the requests without a trace that are traced.")] = 1.0
    request_log: Annotated[
        Path | None, typer.Option(help="A file for a line of JSON a request, in which texts are their lengths.")
    ] = None
    request_log_bytes: Annotated[int, typer.Option(help="Past so many bytes that file is moved to FILE.1.")] = 100 << 20
    request_log_texts: Annotated[
        bool, typer.Option("--request-log-texts", help="With the requests as they came, texts and all.")
    ] = False
    affinity: Annotated[bool, typer.Option(help="Send equal prompt beginnings to the same replica.")] = True
    affinity_slack: Annotated[int, typer.Option(help="How many requests busier that replica may be.")] = 8
    health_interval: Annotated[float, typer.Option(help="Seconds between health checks of replicas.")] = 2.0
    strict_fields: Annotated[
        bool, typer.Option(help="Refuse unknown fields of a request; without it they are ignored and reported.")
    ] = False
    alias: Annotated[
        list[str] | None, typer.Option(help="NAME=MODEL: another name of a model; give it once a name.")
    ] = None
    stored_responses: Annotated[
        int, typer.Option(help="How many answers of /v1/responses are kept for previous_response_id; 0 keeps none.")
    ] = 1000
    web: Annotated[bool, typer.Option(help="Serve the chat page at / and the API page at /docs.")] = True
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"


def _serve_with(flags: Flags) -> None:
    """Serve the OpenAI API for models on Triton."""
    try:
        config = _config(
            host=flags.host,
            port=flags.port,
            workers=flags.workers,
            replicas=tuple(Replica.parse(text) for text in flags.triton or ["localhost:8001"]),
            api_keys=(*(flags.api_key or ()), *_keys_in(flags.api_key_file)),
            admin_keys=tuple(flags.admin_key or ()),
            restrictions=tuple(Restriction.parse(text) for text in flags.openai_restricted_api or ()),
            cors_origins=tuple(flags.cors_origin or ()),
            max_body_bytes=flags.max_body_bytes,
            max_header_bytes=flags.max_header_bytes,
            header_timeout_s=flags.header_timeout,
            max_concurrency_per_key=flags.max_concurrency_per_key,
            max_choices=flags.max_choices,
            request_timeout_s=flags.request_timeout,
            tls_certificate=_file("--tls-certificate", flags.tls_certificate),
            tls_key=_file("--tls-key", flags.tls_key),
            tls_client_ca=_file("--tls-client-ca", flags.tls_client_ca),
            tool_parser=flags.tool_parser,
            reasoning_parser=flags.reasoning_parser,
            trust_request_chat_template=flags.trust_request_chat_template,
            generation_config=flags.generation_config,
            otlp_endpoint=flags.otlp_endpoint,
            otlp_ratio=flags.otlp_ratio,
            request_log=None if flags.request_log is None else str(flags.request_log.absolute()),
            request_log_bytes=flags.request_log_bytes,
            request_log_texts=flags.request_log_texts,
            affinity=flags.affinity,
            affinity_slack=flags.affinity_slack,
            health_interval_s=flags.health_interval,
            web=flags.web,
            strict_fields=flags.strict_fields,
            aliases=_aliases(flags.alias or ()),
            stored_responses=flags.stored_responses,
        )
        if flags.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"--log-level {flags.log_level!r} is not debug, info, warning or error")
        _serve(config, flags.log_level)
    except (ValueError, OSError) as error:
        typer.echo(plain(f"nereid openai: {error}"), err=True)
        raise typer.Exit(2) from None


def main(**given: Any) -> None:
    _serve_with(Flags(**given))


def _describe(command: Callable[..., None]) -> None:
    """Typer reads a command's flags from its signature: here they are the fields of `Flags`."""
    hints = get_type_hints(Flags, include_extras=True)
    fields = inspect.signature(Flags).parameters.values()
    command.__doc__ = _serve_with.__doc__
    command.__annotations__ = hints
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [field.replace(annotation=hints[field.name]) for field in fields]
    )


_describe(main)


def _serve(config: ShimConfig, log_level: str) -> None:
    try:
        from clients.openai.workers import serve  # here, so that `nereid` starts without the openai extra
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'nereid[openai]'") from None
    if config.otlp_endpoint is not None and find_spec("opentelemetry") is None:
        raise ValueError("--otlp-endpoint needs the OpenTelemetry SDK: pip install 'nereid[tracing]'")
    if config.request_log is not None:
        _check_log(config.request_log)  # a worker could only fail on it
    serve(config, log_level)


def _config(**settings: object) -> ShimConfig:
    """Validated as msgspec validates: a wrong value is a sentence with the setting's name."""
    return msgspec.convert(msgspec.to_builtins(settings), ShimConfig)


def _keys_in(path: Path | None) -> list[str]:
    if path is None:
        return []
    wanted = "give a file with one key a line"
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"--api-key-file {path} cannot be read ({error.strerror}): {wanted}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {path} is no text in UTF-8: {wanted}") from None
    if not keys:
        raise ValueError(f"--api-key-file {path} holds no key: {wanted}, or leave the flag out to let everyone in")
    return keys


def _aliases(texts: Iterable[str]) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for text in texts:
        name, _, model = text.partition("=")
        if not name or not model:
            raise ValueError(f"--alias {text!r} is not NAME=MODEL")
        if aliases.setdefault(name, model) != model:
            raise ValueError(f"--alias {name!r} is given twice, for {aliases[name]!r} and for {model!r}: give it once")
    return aliases


def _file(flag: str, path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        files.open_regular(path).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {path} cannot be read ({error.strerror}): give a PEM file that is there and that this user may "
            "read"
        ) from None
    return str(path)


def _check_log(path: str) -> None:
    """Opened as workers do, but for a pipe, which has to have its reader."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600))
    except OSError as error:
        raise ValueError(
            f"--request-log {path} cannot be written ({error.strerror}): give a file in a folder that is there and "
            "that this user may write to"
        ) from None


def run() -> None:
    typer.run(main)
