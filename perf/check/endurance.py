"""What takes long, through a server on a GPU: loads and unloads in a row, and many long requests on a small pool.

    python -m perf.check.endurance CHECKPOINT [loads] [overcommit] --set load_format=dummy [--json FILE]
    python -m perf.check.endurance CHECKPOINT loads --frontends 1 --set load_format=dummy

tritonserver ends the frontends of a model one after another, 1.3 s each: loads take least with one.

One server in deterministic mode with a pool for `--held` requests runs what is named, without a name both.

loads: the checkpoint under another name is loaded, asked and unloaded `--cycles` times, while the first one answers on
the same GPU. After each unload: device memory in use, tritonserver's memory, descriptors, shared memory regions, and
processes. Those of the last are held to those after the fifth; tritonserver's memory is told, and held to nothing.
overcommit: `--requests` requests of `--tokens` tokens at once, seeded, at temperature 1. Each has all of its tokens,
and some of them that run alone afterwards have the same ones.

Exits with 1 when anything is wrong; what is stands in the result. `tests.chaos.endurance` has the same two, and more,
with the demo model on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from clients.python import Client, SamplingParams
from clients.python.wire import ServerError
from engine.models import registry
from engine.serving.launch import guard
from perf import suite
from perf.bench.serving import GrpcTransport, measure
from perf.provenance import provenance
from perf.workload import Spec, parse, requests

FIGURES = ("loads", "overcommit")
# Later unloads are compared with this one: graphs are made and files opened in the first of them.
SETTLED = 5
DEVICE_MB = 64
PROMPT = (16, 64)
SEED = 17
MAX_ROWS = 32
BLOCK_SIZE = 16
# Tokens of each answer beside a load, and what they are drawn with.
BESIDE = SamplingParams(temperature=1.0, seed=3, max_tokens=64, ignore_eos=True)
_UNLOAD_S = 60.0
_PROCESSES_S = 30.0
_LOOK_S = 0.02


@dataclass(frozen=True)
class Sample:
    """What is in use after an unload. device_mb: of its GPUs in MiB, None without one; rss_mb (MiB), descriptors and
    shared memory regions are tritonserver's; processes: of the server, engines included."""

    device_mb: int | None
    rss_mb: int
    descriptors: int
    regions: int
    processes: int


def grown(samples: Sequence[Sample]) -> list[str]:
    """A sentence for each thing that the last unload left more of than the fifth, or the first of fewer."""
    first, last = samples[min(SETTLED, len(samples) - 1) - 1], samples[-1]
    found = [
        f"{name}: {getattr(first, name)} before, {getattr(last, name)} after the last unload"
        for name in ("descriptors", "regions", "processes")
        if getattr(last, name) > getattr(first, name)
    ]
    if first.device_mb is not None and last.device_mb is not None and last.device_mb > first.device_mb + DEVICE_MB:
        found.append(f"device memory: {first.device_mb} MB before, {last.device_mb} after the last unload")
    return found


class Server:
    """A running `nereid serve`: what it holds, and what it says of `model`."""

    def __init__(self, process: psutil.Process, model: str) -> None:
        self._process = process
        self._model = model
        self._triton = next(c for c in process.children() if Path(c.cmdline()[0]).name == "tritonserver")

    def processes(self) -> int:
        """How many it has, with the engines: they are nobody's children, and were told the server's pid."""
        below = {self._process.pid} | guard.descendants(self._process.pid)
        for engine in psutil.process_iter(["cmdline"]):
            words = engine.info["cmdline"] or ()
            if "engine.serving.host" in words and below & {int(word) for word in words if word.isdigit()}:
                below |= {engine.pid} | guard.descendants(engine.pid)
        return len(below)

    def sample(self, processes: int) -> Sample:
        """Once there are no more than so many processes, or they have had the time to end."""
        end = time.monotonic() + _PROCESSES_S
        few = 0  # looks in a row: what starts or ends during a look may be missed
        while few < 2 and time.monotonic() < end:
            left = self.processes()
            few = few + 1 if left <= processes else 0
            time.sleep(_LOOK_S)
        pid = self._triton.pid
        return Sample(
            device_memory(),
            self._triton.memory_info().rss >> 20,
            len(os.listdir(f"/proc/{pid}/fd")),
            len(guard.regions(pid) or ()),
            left,
        )

    def metric(self, name: str) -> float:
        """The sum over frontends of a metric of the model."""
        with urllib.request.urlopen(f"http://localhost:{suite.METRICS}/metrics", timeout=10) as page:
            text = page.read().decode()
        label = re.escape(f'model="{self._model}"')
        found = re.findall(rf"^(?:vllm|nereid):{name}\{{[^}}]*{label}[^}}]*\}} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def blocks_left(self) -> int:
        """Blocks of the pool that requests hold, once none has any or they have had the time to end."""
        end = time.monotonic() + _PROCESSES_S
        while (left := self.metric("kv_cache_blocks_used")) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return int(left)


def device_memory() -> int | None:
    """MiB in use on the GPUs that a server here sees; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["--id", seen]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return sum(map(int, done.stdout.split())) if done.returncode == 0 else None


def loads(server: Server, model: str, other: str, cycles: int, prompt: list[int]) -> dict[str, Any]:
    """The figures of `cycles` loads and unloads of `other` beside `model`."""
    samples: list[Sample] = []
    answers: list[list[int] | str] = []
    seconds: list[float] = []
    processes = server.processes()
    url = f"localhost:{suite.GRPC}"

    def ask(client: Client) -> list[int] | str:
        try:
            return client.complete(prompt, BESIDE).token_ids
        except ServerError as error:
            return str(error)

    with (
        InferenceServerClient(url) as control,
        Client(url, model) as base,
        Client(url, other) as loaded,
        ThreadPoolExecutor(1) as beside,
    ):
        for number in range(cycles):
            began = time.perf_counter()
            asked = [beside.submit(ask, base)]
            try:
                control.load_model(other)
                asked.append(beside.submit(ask, base))
                answers.append(ask(loaded))
                unload(control, other)
            except InferenceServerException as error:
                answers.append(str(error))
            answers += [one.result() for one in asked]
            samples.append(server.sample(processes))
            seconds.append(time.perf_counter() - began)
            if number % 10 == 9 or number == cycles - 1:
                print(f"{number + 1} loads and unloads, {sum(seconds):.0f} s: {samples[-1]}", flush=True)
    return told_of_loads(samples, answers, seconds)


def unload(control: InferenceServerClient, model: str) -> None:
    """Returns when the model is gone. Raises InferenceServerException when it stays."""
    control.unload_model(model)
    end = time.monotonic() + _UNLOAD_S
    while control.is_model_ready(model):
        if time.monotonic() > end:
            raise InferenceServerException(f"{model} is not unloaded after {_UNLOAD_S:g} s")
        time.sleep(_LOOK_S)


def told_of_loads(
    samples: Sequence[Sample], answers: Sequence[list[int] | str], seconds: Sequence[float]
) -> dict[str, Any]:
    """The result of loads and unloads. answers: tokens of each request, or its error; all were the same request."""
    errors = [answer for answer in answers if isinstance(answer, str)]
    whole = [answer for answer in answers if not isinstance(answer, str)]
    found = {
        "cycles": len(samples),
        "seconds": round(sum(seconds), 1),
        "cycle_s": round(statistics.median(seconds), 2),
        "requests": len(answers),
        "errors": len(errors),
        "short": sum(len(answer) != BESIDE.max_tokens for answer in whole),
        "different": sum(answer != whole[0] for answer in whole),
        "settled": asdict(samples[min(SETTLED, len(samples) - 1) - 1]),
        "last": asdict(samples[-1]),
        "device_mb": [sample.device_mb for sample in samples],
        "rss_mb": [sample.rss_mb for sample in samples],
    }
    counted = [f"{found[name]} requests: {name}" for name in ("errors", "short", "different") if found[name]]
    return {**found, "wrong": counted + grown(samples) + errors[:3]}


def overcommit(
    server: Server, model: str, spec: Spec, alone: int, processes: int, ids: tuple[int, int]
) -> dict[str, Any]:
    """The figures of all requests of `spec` at once, and of `alone` of them again, one after the other. ids: of
    prompts, from and up to."""
    transport = GrpcTransport(f"localhost:{suite.GRPC}", model)
    figures, answers = measure(transport, spec, processes, *ids)
    left, preemptions = server.blocks_left(), int(server.metric("num_preemptions_total"))
    given = {answer.ids for answer in answers}  # which request an answer is of does not come back with it
    made = requests(spec, *ids)
    began, different = time.perf_counter(), 0
    # Spread over all of them: the oldest requests are never preempted.
    for number in [i * (spec.requests - 1) // max(1, alone - 1) for i in range(alone)]:
        one = replace(spec, requests=1, in_flight=1, seed=spec.seed + number)
        _, (answer,) = measure(transport, one, 1, *ids, [made[number].prompt])
        different += answer.error is not None or answer.ids not in given
    return told_of_overcommit(
        {
            "requests": figures["requests"],
            "tokens": spec.output[0],
            "failed": figures["failed"],
            "first_error": figures.get("first_error", ""),
            "short": figures.get("short", 0),
            "seconds": figures.get("seconds"),
            "tokens_per_s": figures.get("output_tokens_per_s"),
            "tokens_per_response": figures.get("tokens_per_event"),
            "preemptions": preemptions,
            "blocks_left": left,
            "alone": alone,
            "alone_different": different,
            "alone_s": round(time.perf_counter() - began, 1),
        }
    )


def told_of_overcommit(found: Mapping[str, Any]) -> dict[str, Any]:
    """The result with what is wrong about it."""
    wrong = [f"{name}: {found[name]}" for name in ("failed", "short", "alone_different", "blocks_left") if found[name]]
    if not found["preemptions"]:
        wrong.append("no request was preempted: the pool is not too small for them")
    return {**found, "wrong": wrong}


def span(vocabulary: int) -> tuple[int, int]:
    """Token ids of prompts: from, and up to."""
    return vocabulary // 4, min(100_000, vocabulary)


def settings_of(held: int, tokens: int) -> list[str]:
    """Of a server whose pool holds so many requests of so many tokens, and whose scheduler would run more."""
    longest = max(tokens, BESIDE.max_tokens) + PROMPT[1]
    return [
        "runtime.deterministic=true",
        f"cache.block_size={BLOCK_SIZE}",
        f"cache.num_blocks={held * -(-longest // BLOCK_SIZE)}",
        f"max_model_len={longest}",
        f"scheduler.max_rows={MAX_ROWS}",
    ]


def command_of(model: Path, other: Path, settings: list[str], frontends: int, repository: Path) -> list[str]:
    """Serves a repository with the model under both names, and starts with the first alone."""
    other.symlink_to(model)
    suite.nereid_command(other, repository, settings, frontends)
    return [*suite.nereid_command(model, repository, settings, frontends), "--model", model.name]


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="checkpoint folder")
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help=f"{' or '.join(FIGURES)}; default: both")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the server")
    parser.add_argument("--cycles", type=int, default=50, help="loads and unloads, 2 or more")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=10_000, help="of each request")
    parser.add_argument("--held", type=int, default=10, help="requests that the pool holds")
    parser.add_argument("--alone", type=int, default=5, help="requests that run again alone")
    parser.add_argument("--frontends", type=int, default=4)
    parser.add_argument("--processes", type=int, default=10, help="client processes")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    given = parser.parse_args(words)
    if unknown := set(given.figures) - set(FIGURES):
        parser.error(f"no figure is called {', '.join(sorted(unknown))}: use {', '.join(FIGURES)}")
    if given.cycles < 2:
        parser.error(f"--cycles is {given.cycles}, and the last unload is compared with an earlier one: give 2 or more")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    given = arguments_of(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is ended too
    model = given.model.absolute()
    low, high = span(registry.values(model)["vocab_size"])
    prompt = f"{PROMPT[0]}-{PROMPT[1]}"
    spec = parse(f"c={given.requests}:n={given.requests}:in={prompt}:out={given.tokens}:temperature=1:w=0:seed={SEED}")
    settings = [*settings_of(given.held, given.tokens), *given.set]
    wrong: list[str] = []

    def record(figure: str, found: dict[str, Any]) -> None:
        wrong.extend(found["wrong"])
        line = json.dumps(
            {"figure": figure, **found, "ready_s": round(seconds, 1), "settings": settings} | provenance()
        )
        print(line, flush=True)
        if given.json:
            with given.json.open("a") as file:
                file.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / f"{model.name}-again"
        command = command_of(model, other, settings, given.frontends, Path(folder) / "repository")
        ready = f"http://localhost:{suite.HTTP}/v2/models/{model.name}/ready"
        with suite.running(command, ready, Path(folder) / "log") as (process, seconds):
            server = Server(process, model.name)
            asked = given.figures or FIGURES
            # First: its clients are forked, which no process with a gRPC connection may be.
            if "overcommit" in asked:
                record("overcommit", overcommit(server, model.name, spec, given.alone, given.processes, (low, high)))
            if "loads" in asked:
                ids = requests(spec, low, high)[0].prompt
                record("loads", loads(server, model.name, other.name, given.cycles, ids))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
