"""The `nereid` command: serve a model repository, add a checkpoint to it, say what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from engine.serving import doctor as checks
from engine.serving import launcher, renderer, repository, serve_loop
from engine.types import RequestError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Serve language models on Triton Inference Server.")
console = Console(stderr=True)

REPOSITORY = Path("model_repository")

RepositoryOption = Annotated[Path, typer.Option("--model-repository", help="Folder of the models.")]


@app.command()
def serve(
    model_repository: RepositoryOption = REPOSITORY,
    model: Annotated[list[str] | None, typer.Option(help="Serve this model only; may be repeated.")] = None,
    http_port: int = 8000,
    grpc_port: int = 8001,
    metrics_port: int = 8002,
    local: Annotated[bool, typer.Option("--local", help="Listen on 127.0.0.1 alone.")] = False,
    exit_timeout_secs: Annotated[int, typer.Option(help="How long SIGTERM waits for streams to end.")] = 30,
    log_verbose: Annotated[int, typer.Option(help="Triton's verbosity.")] = 0,
) -> None:
    """Start Triton Inference Server on the model repository and stay up until Ctrl-C or SIGTERM."""
    options = launcher.Options(
        repository=model_repository.absolute(),
        models=tuple(model or ()),
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        local=local,
        exit_timeout_s=exit_timeout_secs,
        log_verbose=log_verbose,
    )
    try:
        status = serve_loop.serve(options, console)
    except launcher.LaunchError as error:
        raise _failure(str(error)) from None
    raise typer.Exit(status)


@app.command()
def add(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder in Hugging Face layout.")],
    name: Annotated[str, typer.Option(help="Name of the model.")],
    model_repository: RepositoryOption = REPOSITORY,
    tokenizer: Annotated[bool, typer.Option(help="Also write NAME_tokenizer.")] = True,
    ensemble: Annotated[bool, typer.Option(help="Also write NAME_ensemble; needs the tokenizer.")] = True,
    frontends: Annotated[
        int | None, typer.Option(min=1, help="Frontend processes over the one engine; 4 with a GPU, else 2.")
    ] = None,
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
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="A setting as KEY=VALUE, such as cache.num_blocks=4096.")
    ] = None,
) -> None:
    """Write a model-repository entry for CHECKPOINT: config.pbtxt, model.py, and a tokenizer and an ensemble for it."""
    try:
        written = repository.add(
            checkpoint,
            name,
            model_repository,
            settings=_settings(set_ or []),
            tokenizer=tokenizer or ensemble or tensorrt_llm_names,
            ensemble=ensemble,
            frontends=frontends or launcher.default_frontends(),
            tensorrt_llm_names=tensorrt_llm_names,
            decoupled=decoupled,
        )
        if not renderer.has_template(checkpoint):
            console.print(f"note: {checkpoint} has no chat template, so chat messages cannot be rendered for it")
    except (repository.AddError, RequestError) as error:
        raise _failure(str(error)) from None
    for folder in written:
        console.print(f"wrote {folder}")
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


def _settings(pairs: list[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise _failure(f"--set {pair}: write KEY=VALUE")
        settings[key] = value
    return settings


def _failure(sentence: str) -> typer.Exit:
    console.print(f"[red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


if __name__ == "__main__":
    main()
