"""The `nereid` command: serve a model repository, add a checkpoint to it, say what is missing."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from engine import env
from engine.parallel import remote_host
from engine.parallel.host_link import MEET_S
from engine.parallel.placement import Placement, PlacementError, placed
from engine.plain import log_to_stderr
from engine.serving.frontend import renderer
from engine.serving.frontend.settings import parse
from engine.serving.launch import catalog, gguf_folder, gpus, hub, launcher, repository, serve_loop
from engine.serving.launch import doctor as checks
from engine.terminal import Console
from engine.types import RequestError, shown

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Serve language models on Triton Inference Server.")
console = Console(stderr=True)

REPOSITORY = Path("model_repository")
MAX_PORT = 65535

Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A folder in Hugging Face layout, a GGUF file, or ORG/NAME or ORG/NAME:Q4_K_M (the one of its GGUF models "
        "whose name ends so), which is fetched from the Hugging Face Hub."
    ),
]
CheckpointAlone = Annotated[
    str | None,
    typer.Argument(
        help="A checkpoint to serve alone: a folder, a GGUF file, or ORG/NAME of the Hugging Face Hub.",
        show_default=False,
    ),
]
Host = Annotated[
    str,
    typer.Option(help="The address to listen on: 127.0.0.1 keeps other machines out, 0.0.0.0 is all of this one's."),
]
Name = Annotated[str | None, typer.Option(help="Name of the model; the last part of CHECKPOINT without it.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of ORG/NAME; its main branch without it.")]
Frontends = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=repository.MAX_FRONTENDS,
        help="Frontend processes over the one engine, of some 60 MB each; 4 with a GPU, else 2.",
    ),
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="A setting as KEY=VALUE, such as cache.num_blocks=4096.")
]
ServedNames = Annotated[
    list[str] | None,
    typer.Option("--served-name", help="Another name of the model in the OpenAI API; may be repeated."),
]
Template = Annotated[Path | None, typer.Option("--chat-template", help="A Jinja file in place of its own template.")]
Port = Annotated[int, typer.Option(min=1, max=MAX_PORT)]
RepositoryOption = Annotated[Path, typer.Option("--model-repository", help="Folder of the models.")]


@app.command()
def serve(
    checkpoint: CheckpointAlone = None,
    model_repository: Annotated[
        Path | None,
        typer.Option(help="Folder of the models, when there is no CHECKPOINT; ./model_repository without it."),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Serve this model only; may be repeated.")] = None,
    name: Name = None,
    revision: Revision = None,
    frontends: Frontends = None,
    served_name: ServedNames = None,
    chat_template: Template = None,
    set_: Settings = None,
    http_port: Port = 8000,
    grpc_port: Port = 8001,
    metrics_port: Annotated[int, typer.Option(min=0, max=MAX_PORT, help="0 serves no metrics.")] = 8002,
    host: Host = launcher.EVERY_ADDRESS,
    exit_timeout_secs: Annotated[int, typer.Option(min=0, help="How long SIGTERM waits for streams to end.")] = 30,
    log_verbose: Annotated[int, typer.Option(min=0, help="Triton's verbosity.")] = 0,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="An OpenTelemetry collector (http://HOST:4318) that spans of requests go to.")
    ] = None,
) -> None:
    """Start Triton Inference Server on the model repository, or for CHECKPOINT alone, until Ctrl-C or SIGTERM.

    Where a launcher of several processes gives this one another RANK than 0, it holds ranks, as `nereid rank` does.
    """
    placement = _placement()
    if placement.host > 0:
        _hold_ranks(placement, None if checkpoint is None else _folder(checkpoint, revision).absolute(), MEET_S)
        return
    own: Path | None = None
    if checkpoint is not None:
        _check_alone(model_repository, model)
        own = _own_repository(checkpoint, name, revision, frontends, _settings(set_ or [], served_name, chat_template))
    elif name or revision or frontends or set_ or served_name or chat_template:
        raise _failure(
            "--name, --revision, --frontends, --served-name, --chat-template and --set are for a CHECKPOINT: name one, "
            "or leave them out"
        )
    options = launcher.Options(
        repository=own or (model_repository or REPOSITORY).absolute(),
        models=tuple(model or ()),
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        host=host,
        exit_timeout_s=exit_timeout_secs,
        log_verbose=log_verbose,
        otlp_endpoint=otlp_endpoint,
    )
    try:
        status = serve_loop.serve(options, Console(stderr=True, goes_on=True))
    except launcher.LaunchError as error:
        raise _failure(str(error)) from None
    finally:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
    raise typer.Exit(status)


@app.command()
def rank(
    checkpoint: Annotated[
        Path | None, typer.Option(help="The model's folder, where it is another than on the first host.")
    ] = None,
    patience: Annotated[float, typer.Option(min=0.0, help="Seconds to look for the first host, each time.")] = MEET_S,
) -> None:
    """Hold this host's ranks of a model that is served over several hosts; RANK 0 runs `nereid serve`.

    Reads MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or what LeaderWorkerSet sets.
    """
    _hold_ranks(_placement(), None if checkpoint is None else checkpoint.absolute(), patience)


@app.command()
def add(
    checkpoint: Checkpoint,
    name: Name = None,
    revision: Revision = None,
    model_repository: RepositoryOption = REPOSITORY,
    tokenizer: Annotated[bool, typer.Option(help="Also write NAME_tokenizer.")] = True,
    ensemble: Annotated[bool, typer.Option(help="Also write NAME_ensemble; needs the tokenizer.")] = True,
    frontends: Frontends = None,
    decoupled: Annotated[
        bool, typer.Option(help="Without it the model streams nothing, and unary calls reach it: gRPC's and /infer.")
    ] = True,
    tensorrt_llm_names: Annotated[
        bool,
        typer.Option(
            "--tensorrt-llm-names",
            help="Also write preprocessing, tensorrt_llm, postprocessing, tensorrt_llm_bls and ensemble over NAME.",
        ),
    ] = False,
    served_name: ServedNames = None,
    chat_template: Template = None,
    set_: Settings = None,
) -> None:
    """Write a model-repository entry for CHECKPOINT: config.pbtxt, model.py, and a tokenizer and an ensemble for it."""
    settings = _settings(set_ or [], served_name, chat_template)
    if not tokenizer and (ensemble or tensorrt_llm_names):
        raise _failure(
            "--no-tokenizer goes with --no-ensemble and without --tensorrt-llm-names, which need the tokenizer: give "
            "--no-ensemble too, or leave --no-tokenizer out"
        )
    folder = _folder(checkpoint, revision)
    try:
        written = repository.add(
            folder,
            _last_part(checkpoint, folder) if name is None else name,
            model_repository,
            settings=settings,
            tokenizer=tokenizer,
            ensemble=ensemble,
            frontends=frontends or launcher.default_frontends(),
            tensorrt_llm_names=tensorrt_llm_names,
            decoupled=decoupled,
        )
        held = repository.held(folder, written[0])
        text = _text(written[0])
        if "chat_template" not in settings and not renderer.has_template(text):
            lacks = checkpoint if text == held else text
            console.print(
                f"note: {lacks} has no chat template, so chat messages cannot be rendered for it", markup=False
            )
    except (repository.AddError, RequestError) as error:
        raise _failure(str(error)) from None
    for entry in written:
        console.print(f"wrote {entry}")
    note = gpus.advice(held, settings, gpus.present())
    if note is not None:
        console.print(f"[yellow]note:[/] {escape(note)}", highlight=False, soft_wrap=True)
    console.print(f"serve it with: nereid serve --model-repository {model_repository}")


@app.command()
def doctor() -> None:
    """Say what this machine has and lacks for serving, and how to get it."""
    table = Table("", "what", "found", "what to do")
    findings = checks.examine()
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]missing[/]" if finding.needed else "[yellow]without[/]"
        table.add_row(mark, finding.what, finding.found, "" if finding.ok else finding.remedy)
    Console(width=max(100, shutil.get_terminal_size().columns)).print(table)
    raise typer.Exit(0 if all(finding.ok or not finding.needed for finding in findings) else 1)


def main() -> None:
    app()


def _placement() -> Placement:
    try:
        return placed(env.read().launched)
    except PlacementError as error:
        raise _failure(str(error)) from None


def _hold_ranks(placement: Placement, checkpoint: Path | None, patience_s: float) -> None:
    """Until the engine is told to end; SIGTERM ends the ranks alone."""
    log_to_stderr(f"nereid host {placement.host}: %(message)s")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        remote_host.serve(placement, checkpoint, patience_s)
    except (PlacementError, remote_host.HostError) as error:
        raise _failure(str(error)) from None


def _folder(checkpoint: str, revision: str | None) -> Path:
    """The folder that CHECKPOINT names, fetched where it is a name of the hub."""
    if not hub.is_name(checkpoint):
        if revision is not None:
            raise _failure(f"--revision is for ORG/NAME of the Hugging Face Hub; {checkpoint} is a path: leave it out")
        return Path(checkpoint)
    try:
        return hub.fetch(checkpoint, revision)
    except hub.HubError as error:
        raise _failure(str(error)) from None


def _text(entry: Path) -> Path:
    """The folder whose tokenizer and template an entry that was written takes."""
    return parse(catalog.parameters(entry), entry).tokenizer


def _last_part(checkpoint: str, source: Path) -> str:
    return gguf_folder.model_name(source) if gguf_folder.is_gguf(source) else Path(checkpoint).absolute().name


def _check_alone(model_repository: Path | None, models: list[str] | None) -> None:
    if model_repository is not None or models:
        raise _failure(
            "CHECKPOINT is served alone, without --model-repository and --model: `nereid add` writes it into a model "
            "repository"
        )


def _own_repository(
    checkpoint: str, name: str | None, revision: str | None, frontends: int | None, settings: dict[str, str]
) -> Path:
    """A new model repository in a temporary folder, for one checkpoint; the caller removes it."""
    source = _folder(checkpoint, revision)
    own: Path | None = None
    try:
        own = Path(tempfile.mkdtemp(prefix="nereid-models-", dir=env.temporary_folder()))
        repository.add(
            source,
            _last_part(checkpoint, source) if name is None else name,
            own,
            settings=settings,
            tokenizer=True,
            ensemble=True,
            frontends=frontends or launcher.default_frontends(),
        )
    except (repository.AddError, RequestError, OSError) as error:
        if own is not None:
            shutil.rmtree(own, ignore_errors=True)
        raise _failure(str(error)) from None
    return own


def _settings(
    pairs: list[str], served_names: list[str] | None = None, chat_template: Path | None = None
) -> dict[str, str]:
    settings = {}
    if served_names:
        settings["served_names"] = json.dumps(served_names, ensure_ascii=False)
    if chat_template is not None:
        if not chat_template.is_file():
            raise _failure(f"--chat-template {chat_template}: there is no such file: give one with a Jinja template")
        settings["chat_template"] = str(chat_template.absolute())
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise _failure(f"--set {pair}: write KEY=VALUE")
        if settings.get(key, value) != value:
            raise _failure(f"{key} is given twice, as {shown(settings[key])} and as {shown(value)}: give it once")
        settings[key] = value
    return settings


def _failure(sentence: str) -> typer.Exit:
    console.print(f"[red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


if __name__ == "__main__":
    main()
