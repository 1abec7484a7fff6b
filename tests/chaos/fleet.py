"""The processes: two `nereid serve` of the demo model and the shim over both, each found again by a mark of its own."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from clients.python.local_server import free_ports
from engine import env
from engine.demo import make as demo
from engine.serving.launch import repository

EXIT_TIMEOUT_S = 5
LONGEST_S = 60.0  # that a request through the shim may take
MODELS = ("demo", "demo_tokenizer", "demo_ensemble")
WORKERS = 2  # of the shim
EXTRA = "extra"  # is there, and loaded by a fault alone
# Float32, so that tokens can be compared; more starts than any schedule asks for, for giving up is no fault of its own.
SETTINGS = {
    "runtime.dtype": "float32",
    "cache.num_blocks": "256",
    "scheduler.max_rows": "16",
    "scheduler.max_waiting": "64",
    "scheduler.token_budget": "256",
    "restart_limit": "1000",
    "speculation.method": "suffix",  # what is drafted changes no token
}
# A loop that a request can ask for: what a checkpoint from the network may hold.
_SPIN = (
    "{% if spin %}{% for a in range(spin) %}{% for b in range(spin) %}{% for c in range(spin) %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endif %}"
)
# Debian's package `libfaketime`: what a process asks its wall clock for is moved by what a file says.
CLOCK_LIBRARY = next(iter(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")), None)
_ABORT = "boost::interprocess::lock_exception"
_DIED, _COMPLETE = "died; another takes its place", "its instances are complete again"  # says `nereid serve`
_RUN_FOLDER_BYTES = 1 << 20
_READY_S = 90.0


class FleetFailed(Exception):
    """A part of the fleet does not start; the message holds the end of its log."""


class Marked:
    """A process and all that come from it, known by the run folder in their environment."""

    def __init__(self, folder: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self.run_folder = folder
        self.log_file = log
        self._environment = environment or {}
        self.process: subprocess.Popen[bytes] | None = None

    def spawn(self, *words: str) -> None:
        changes = {
            **self._environment,
            env.RUN_DIR: str(self.run_folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env.inherited(**changes),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def members(self) -> Iterator[tuple[int, list[str]]]:
        """(pid, command line) of each process with the mark."""
        mark = f"{env.RUN_DIR}={self.run_folder}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
                    if words != [""]:  # a zombie has none
                        yield int(folder.name), words
            except OSError:
                continue

    def wipe(self) -> list[str]:
        """Kill all with the mark; returns the command lines of those that were there."""
        found = list(self.members())
        for pid, _ in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        return [" ".join(words)[:120] for _, words in found]

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def tail(self) -> str:
        return "\n".join(self.log().splitlines()[-30:])


class Replica(Marked):
    """One `nereid serve` and what it started. number: its place in the fleet."""

    def __init__(self, number: int, folder: Path, models: Path, frontends: int, environment: Mapping[str, str]) -> None:
        super().__init__(folder / f"r{number}", folder / f"serve-{number}.log", environment)
        self.number = number
        self.frontends = frontends
        self._models = models
        self.http_port, self.grpc_port, self.metrics_port = free_ports(3)
        self.http, self.grpc = f"127.0.0.1:{self.http_port}", f"127.0.0.1:{self.grpc_port}"
        self.regions: set[str] = set()  # of shared memory, of every stub that was ever seen
        self.lost_frontend = False  # one was killed since the start
        self.hit_stub = False  # a frontend or tokenizer was killed or stopped since the start
        self.keeps_frontends = False  # and another set has taken its place
        self.faults = 0  # that have begun on it
        self.kills: Counter[str] = Counter()  # processes that faults have killed, by role
        self.ends = 0  # how often a fault has ended it as a whole
        self.reviving, self.scaling = threading.Lock(), threading.Lock()
        self._log_before = 0  # characters of its log from earlier starts
        self.run_folder.mkdir(mode=0o700)
        self.mounted = _mount(self.run_folder, _RUN_FOLDER_BYTES)

    def start(self) -> None:
        self.lost_frontend = self.keeps_frontends = self.hit_stub = False
        self._log_before = len(self.log())
        ports = ["--http-port", self.http_port, "--grpc-port", self.grpc_port, "--metrics-port", self.metrics_port]
        chosen = [word for model in MODELS for word in ("--model", model)]
        words = ["engine.serving.launch.cli", "serve", "--model-repository", self._models, *ports, *chosen]
        self.spawn(*map(str, words), "--exit-timeout-secs", str(EXIT_TIMEOUT_S))

    def aborts(self) -> bool:
        """Whether tritonserver 2.51 ends by itself, as it does when a stub dies, or stands still, with a lock. To write
        its trace takes it seconds."""
        return self.hit_stub and _ABORT in self.log()[self._log_before :]

    def replaces(self) -> bool:
        """Whether instances that died are still being replaced: until then the dead are asked beside the new."""
        log = self.log()[self._log_before :]
        return log.rfind(_DIED) > log.rfind(_COMPLETE)

    def wait_ready(self) -> None:
        end = time.monotonic() + _READY_S
        while not (self.says_ready() and len(self.pids("frontend")) >= self.frontends):
            if not self.alive() or time.monotonic() > end:
                raise FleetFailed(f"replica {self.number} is not ready:\n{self.tail()}")
            time.sleep(0.1)
        self.note_regions()

    def pids(self, role: str) -> list[int]:
        """Processes of one role, oldest first: serve, server (tritonserver), engine, frontend, tokenizer."""
        return sorted(pid for pid, words in self.members() if _role(words) == role)

    def roles(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for pid, words in self.members():
            found.setdefault(_role(words), []).append(pid)
        return found

    def note_regions(self) -> None:
        """Remember the shared memory regions of the stubs that live."""
        for _, words in self.members():
            if words[0].endswith("triton_python_backend_stub") and len(words) > 2:
                self.regions.add(words[2].strip("/"))

    def stale_regions(self) -> set[str]:
        """Regions in /dev/shm of stubs that are gone."""
        living = {w[2].strip("/") for _, w in self.members() if w[0].endswith("_stub") and len(w) > 2}
        return {name for name in self.regions - living if (Path("/dev/shm") / name).exists()}

    def says_ready(self, model: str = "demo") -> bool:
        return self.get(f"/v2/models/{model}/ready")[0] == 200

    def get(self, path: str, body: bytes | None = None, timeout_s: float = 2.0) -> tuple[int, bytes]:
        """(status, body) from the HTTP port; status 0 when nothing answers."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", body, timeout_s) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def gauges(self) -> dict[str, float]:
        """The model's gauges of the metrics page, without their prefix; empty when it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as page:
                text = page.read().decode()
        except OSError:
            return {}
        pattern = re.compile(r'^(?:vllm|nereid):(\w+)\{[^}]*model="demo"[^}]*\} (\S+)$', re.M)
        return {name: float(value) for name, value in pattern.findall(text)}

    def config(self, model: str = "demo") -> dict[str, object] | None:
        status, body = self.get(f"/v2/models/{model}/config")
        return json.loads(body) if status == 200 else None

    def listens(self) -> bool:
        """Whether anybody listens on one of the three ports."""
        for port in (self.http_port, self.grpc_port, self.metrics_port):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return True
        return False


class Shim(Marked):
    """`nereid openai` over the replicas, with two workers. tls: files of a key and a certificate."""

    def __init__(self, folder: Path, replicas: list[Replica], tls: tuple[Path, Path] | None = None) -> None:
        super().__init__(folder / "shim", folder / "shim.log")
        (self.port,) = free_ports(1)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._replicas = replicas
        self._tls = tls

    def start(self) -> None:
        triton = [w for r in self._replicas for w in ("--triton", f"{r.grpc}:{r.metrics_port}")]
        flags: list[object] = ["--port", self.port, "--workers", WORKERS, "--health-interval", 0.5, *triton]
        flags += ["--request-timeout", LONGEST_S]
        if self._tls is not None:
            flags += ["--tls-key", self._tls[0], "--tls-certificate", self._tls[1]]
        self.spawn("clients.openai", *map(str, flags))

    def workers(self) -> list[int]:
        return sorted(pid for pid, words in self.members() if any("spawn_main" in word for word in words))

    def roles(self) -> dict[str, list[int]]:
        return {"worker": self.workers()}

    def wait_ready(self) -> None:
        end = time.monotonic() + _READY_S
        while self.log().count("startup complete") < 2 or self.health() != 200:
            if not self.alive() or time.monotonic() > end:
                raise FleetFailed(f"the shim is not ready:\n{self.tail()}")
            time.sleep(0.1)

    def says_ready(self, replica: Replica) -> bool:
        """What it says of one replica: tritonserver 2.51's own word for a model knows nothing of its engine."""
        try:
            with urllib.request.urlopen(f"{self.url}/stats", timeout=5) as answer:
                body = json.load(answer)
        except (OSError, ValueError):
            return False
        return any("demo" in one["ready_models"] for one in body["replicas"] if one["replica"] == replica.grpc)

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


class Fleet:
    """Context manager: all of it, started; at the end nothing of it is left, whatever went wrong.

    moves_clock: wall clocks of the replicas' processes can be set, tritonserver's too (`set_clock`). prepare: changes
    the checkpoint. frontends: of a model. tls: the shim takes HTTPS alone, and this process trusts its certificate.
    """

    def __init__(
        self,
        moves_clock: bool = False,
        *,
        replicas: int = 2,
        frontends: int = 2,
        settings: Mapping[str, str] = SETTINGS,
        prepare: Callable[[Path], None] | None = None,
        tls: bool = False,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="nc-"))  # short, for sockets have their paths in it
        self.clock = self.folder / "clock" if moves_clock else None
        self.set_clock(0)
        models = self.folder / "models"
        _checkpoint(self.folder / "demo")
        if prepare is not None:
            prepare(self.folder / "demo")
        for name, tokenizer in (("demo", True), (EXTRA, False)):
            repository.add(
                self.folder / "demo",
                name,
                models,
                settings=settings,
                tokenizer=tokenizer,
                ensemble=tokenizer,
                frontends=frontends,
            )
        clocks = self._clock_environment()
        self.replicas = [Replica(number, self.folder, models, frontends, clocks) for number in range(replicas)]
        self.shim = Shim(self.folder, self.replicas, _certificate(self.folder) if tls else None)

    def set_clock(self, seconds: int) -> None:
        """Wall clocks of the replicas go so many seconds before or behind the machine's, from now on."""
        if self.clock is not None:
            self.clock.write_text(f"{seconds:+d}\n")

    def _clock_environment(self) -> dict[str, str]:
        if self.clock is None:
            return {}
        return {
            "LD_PRELOAD": str(CLOCK_LIBRARY),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_CACHE_DURATION": "1",  # seconds between looks at the file
            "FAKETIME_DONT_RESET": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # which never jumps
        }

    def __enter__(self) -> Fleet:
        try:
            for replica in self.replicas:
                replica.start()
            for replica in self.replicas:
                replica.wait_ready()
            self.shim.start()
            self.shim.wait_ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for part in (self.shim, *self.replicas):
            part.wipe()
        for replica in self.replicas:
            if replica.mounted:
                _unmount(replica.run_folder)
            for name in replica.regions:
                (Path("/dev/shm") / name).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)


def until(condition: Callable[[], object], seconds: float, look_s: float = 0.05) -> bool:
    """Whether `condition()` comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(look_s)
    return True


def _role(words: list[str]) -> str:
    if words[0].endswith("tritonserver"):
        return "server"
    if words[0].endswith("triton_python_backend_stub") and len(words) > 1:  # one that begins has no arguments yet
        model = Path(words[1]).parts[-3]
        return "tokenizer" if model.endswith("_tokenizer") else "frontend" if model == "demo" else "other"
    if "engine.serving.host" in words:
        return "engine" if words[-1] == "demo" else "other"
    if "engine.serving.frontend.renderer" in words:
        return "renderer"
    return "serve" if "engine.serving.launch.cli" in words else "other"


def _checkpoint(folder: Path) -> None:
    demo.make(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "chat_template": _SPIN + config["chat_template"]}))


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    os.environ["SSL_CERT_FILE"] = str(certificate)
    return key, certificate


def _mount(folder: Path, size: int) -> bool:
    """A file system of its own on `folder`, that can be filled; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) == 0


def _unmount(folder: Path) -> None:
    detach = 2  # MNT_DETACH
    ctypes.CDLL(None, use_errno=True).umount2(bytes(folder), detach)
