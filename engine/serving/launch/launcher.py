"""Find a tritonserver and start it: NVIDIA's own inside its container, else the one in the nvidia-pytriton wheel."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import platform
import shutil
import site
import socket
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine import env
from engine.serving.frontend.settings import SettingsError, parse
from engine.serving.launch import catalog
from engine.types import shown

CONTAINER_SERVER = Path("/opt/tritonserver")
WHEEL_HINT = "pip install 'nereid[server]' (it brings nvidia-pytriton 0.7.0, which carries tritonserver 2.51.0)"
EVERY_ADDRESS = "0.0.0.0"
_PYTHON_S = 60.0


class LaunchError(Exception):
    """The server cannot be started; the message says why and what to do."""


class Server(msgspec.Struct, frozen=True):
    """A tritonserver that can be started. library_path: folders its libraries are in."""

    binary: Path
    backends: Path
    library_path: tuple[Path, ...] = ()
    embedded: bool = False


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and where. models empty: all of the repository that have their checkpoint.

    metrics_port: 0 is none: the server has no page of metrics.
    host: the address to listen on, an IPv4 address of this machine or a name of one; 0.0.0.0 is all of them.
    shm_bytes: shared memory of each Python-backend instance at its start (it grows by itself).
    response_threads: of the server for each Python-backend instance. They pass its responses on and run the requests
        that it sends to other models.
    otlp_endpoint: an OpenTelemetry collector, to which the frontends send spans.
    """

    repository: Path
    models: tuple[str, ...] = ()
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    host: str = EVERY_ADDRESS
    exit_timeout_s: int = 30
    shm_bytes: int = 4 << 20
    response_threads: int = 4
    log_verbose: int = 0
    otlp_endpoint: str | None = None
    extra: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """What the server listens on. Raises LaunchError for a name that stands for no IPv4 address."""
        if not self.host:
            raise LaunchError(f"--host is empty: give an address, or leave it out for {EVERY_ADDRESS}")
        try:
            return socket.gethostbyname(self.host)
        except (OSError, UnicodeError) as error:  # of a name that is none; of one that cannot be written as one
            raise LaunchError(
                f"--host {shown(self.host)}: it is no IPv4 address and no name of one ({error})"
            ) from None

    @property
    def own_address(self) -> str:
        """Where this machine reaches the server."""
        return "127.0.0.1" if self.address == EVERY_ADDRESS else self.address


def find_server() -> Server:
    """The server of this machine. Raises LaunchError when there is none."""
    binary = shutil.which("tritonserver") or str(CONTAINER_SERVER / "bin" / "tritonserver")
    if Path(binary).is_file() and (CONTAINER_SERVER / "backends" / "python").is_dir():
        return Server(binary=Path(binary), backends=CONTAINER_SERVER / "backends")
    return embedded_server(env.read().cache_dir)


def embedded_server(cache: Path) -> Server:
    """The wheel's server, its backend folder assembled in `cache` with the stub of the running Python."""
    check_numpy()
    wheel = wheel_folder()
    stub_name = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / stub_name / "triton_python_backend_stub"
    if not stub.is_file():
        found = ", ".join(sorted(p.name for p in (wheel / "python_backend_stubs").iterdir()))
        raise LaunchError(f"nvidia-pytriton has no stub for Python {stub_name} (it has {found}): use one of those")
    libraries = wheel.parents[1] / "nvidia_pytriton.libs"
    key = f"tritonserver-{wheel_version()}-py{stub_name}-{platform.machine()}"
    backends = cache / key / "backends"
    try:
        if not (backends / "python" / stub.name).is_file():
            _assemble(wheel / "backends" / "python", stub, backends / "python")
        own = (libraries, *_python_library(stub, cache / key))
    except OSError as error:
        hint = f"Set {env.CACHE_DIR} to a folder that can be written"
        raise LaunchError(f"the server cannot be put together in {cache}: {error}. {hint}") from None
    return Server(binary=wheel / "bin" / "tritonserver", backends=backends, library_path=own, embedded=True)


def _python_library(stub: Path, cache: Path) -> tuple[Path, ...]:
    """A folder with the shared library of this Python, which the stub needs; none when the wheel brings it or the
    system has it. The folder holds a link to the library and nothing else, so that it hides no other library.

    Raises LaunchError when there is no such library.
    """
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if name.encode() not in stub.read_bytes():
        return ()
    folders = [Path(sys.prefix) / "lib", Path(str(sysconfig.get_config_var("LIBDIR"))), Path(sys.base_prefix) / "lib"]
    found = next((folder / name for folder in folders if (folder / name).is_file()), None)
    if found is None:
        try:
            ctypes.CDLL(name)
        except OSError:
            package = name.removesuffix(".so.1.0")
            raise LaunchError(
                f"the server's Python backend needs {name}, which this machine lacks: run `make setup`, "
                f"or apt install {package} (on Ubuntu 24.04 {package}t64)"
            ) from None
        return ()
    folder = cache / f"python-{zlib.crc32(str(found).encode()):08x}"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / name).symlink_to(found)
    return (folder,)


def wheel_folder() -> Path:
    """`pytriton/tritonserver` of the installed wheel; found without importing pytriton."""
    spec = importlib.util.find_spec("pytriton")
    folder = Path(spec.origin).parent / "tritonserver" if spec is not None and spec.origin else None
    if folder is None or not (folder / "bin" / "tritonserver").is_file():
        raise LaunchError(f"no tritonserver here: none on PATH, and the wheel is not installed. Run {WHEEL_HINT}")
    return folder


def wheel_version() -> str:
    from importlib.metadata import version

    return version("nvidia-pytriton")


def check_numpy() -> None:
    """Refuse numpy 2: the 2.51 stub misreads string inputs under it and dies."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("numpy")
    except PackageNotFoundError:
        raise LaunchError("numpy is not installed: pip install 'numpy>=1.26,<2'") from None
    if int(found.split(".")[0]) >= 2:
        raise LaunchError(
            f"numpy {found} is installed and the embedded tritonserver 2.51 crashes on string inputs under numpy 2: "
            "pip install 'numpy>=1.26,<2'"
        )


def command(server: Server, options: Options) -> list[str]:
    """The server's command line. Models are loaded explicitly, so that load and unload work and a model whose engine
    cannot come back can take itself out of service."""
    models = options.models or [entry.name for entry in catalog.entries(options.repository) if entry.awaits is None]
    return [
        str(server.binary),
        f"--model-repository={options.repository}",
        f"--backend-directory={server.backends}",
        f"--http-port={options.http_port}",
        f"--grpc-port={options.grpc_port}",
        f"--http-address={options.address}",
        f"--grpc-address={options.address}",
        *(
            (f"--metrics-port={options.metrics_port}", f"--metrics-address={options.address}")
            if options.metrics_port
            else ("--allow-metrics=false",)
        ),
        # Our models exchange CPU tensors alone: the default pool would pin 256 MB for nothing.
        "--pinned-memory-pool-byte-size=0",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in models),
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--backend-config=python,shm-default-byte-size={options.shm_bytes}",
        # Of the backend's own 32, each response wakes the one that has slept longest, and is coldest.
        f"--backend-config=python,thread-pool-size={options.response_threads}",
        f"--log-verbose={options.log_verbose}",
        "--disable-auto-complete-config",
        *(() if has_gpu() else ("--allow-gpu-metrics=false",)),
        *options.extra,
    ]


def environment(server: Server, progress: str | None = None, otlp_endpoint: str | None = None) -> dict[str, str]:
    """Environment of the server: stubs inherit it and find `engine` and the packages of this Python by it.

    The 2.51 stub starts an interpreter that ignores PYTHONPATH and takes the packages of the `python3` on PATH.
    """
    own = [str(Path(__file__).resolve().parents[3]), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if not _in_virtual_environment():
        own.append(site.getusersitepackages())
    python_path = list(dict.fromkeys([*own, *env.path_list("PYTHONPATH")]))
    path = [str(Path(sys.executable).parent), *env.path_list("PATH")]
    changes = {
        env.PYTHON: str(engine_python()),
        "PATH": ":".join(dict.fromkeys(path)),
        "PYTHONPATH": ":".join(python_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    libraries = [str(p) for p in server.library_path] + env.path_list("LD_LIBRARY_PATH")
    if libraries:
        changes["LD_LIBRARY_PATH"] = ":".join(libraries)
    if progress is not None:
        changes[env.PROGRESS] = progress
    if otlp_endpoint is not None:
        changes[env.OTLP_ENDPOINT] = otlp_endpoint
    return env.inherited(**changes)


def engine_python() -> Path:
    """The Python that NEREID_PYTHON names, or this one. Names without a folder are looked up on the server's PATH."""
    python = env.read().python
    return python if len(python.parts) == 1 else python.absolute()


def check_python(variables: dict[str, str]) -> None:
    """Raise LaunchError when another Python than this one is to run the engine and cannot: it finds the packages of
    this one by `variables`, which were made for one version."""
    python, version = variables[env.PYTHON], f"{sys.version_info.major}.{sys.version_info.minor}"
    if python == sys.executable:
        return
    words = [python, "-c", "import msgspec, sys; print(*sys.version_info[:2], sep='.')"]
    try:
        done = subprocess.run(
            words,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PYTHON_S,
            check=False,
        )
        found = done.stdout.strip()
        why = f"it is Python {found}" if found else (done.stderr.splitlines() or ["it is no Python"])[-1]
    except (OSError, subprocess.TimeoutExpired) as error:
        found, why = "", getattr(error, "strerror", None) or str(error)
    if found != version:
        raise LaunchError(
            f"{env.PYTHON} is {shown(python)!r}, which cannot run the engine ({shown(why)}): unset it, or set it to a "
            f"Python {version} with Nereid's packages"
        )


def start(options: Options, progress: str | None = None, **popen: object) -> subprocess.Popen[str]:
    """Start the server; it is the caller's child. Raises LaunchError when there is nothing to start."""
    check_models(options)
    check_settings(options)
    check_ports(options)
    for model_py in options.repository.glob("*/*/model.py"):
        catalog.compile_ahead(model_py)
    server = find_server()
    argv: Sequence[str] = command(server, options)
    variables = environment(server, progress, options.otlp_endpoint)
    check_python(variables)
    package = Path(__file__).resolve().parents[3]  # stubs look for `engine` in the folder they start in
    return subprocess.Popen(argv, env=variables, text=True, cwd=package, **popen)  # type: ignore[call-overload]


def check_models(options: Options) -> None:
    """Raise LaunchError when the repository, or a model that is asked for, is not there, or nothing can be served."""
    if not options.repository.is_dir():
        raise LaunchError(f"{options.repository} is not a folder: give the model repository with --model-repository")
    found = {entry.name: entry.awaits for entry in catalog.entries(options.repository)}
    if not found:
        raise LaunchError(f"{options.repository} holds no model: write one with `nereid add CHECKPOINT --name NAME`")
    for model in options.models:
        if model not in found:
            raise LaunchError(f"there is no model {model!r} in {options.repository}: there are {', '.join(found)}")
        if found[model] is not None:
            raise LaunchError(f"{model} waits for its checkpoint: copy it, or make a link to it, at {found[model]}")
    if None not in found.values():
        raise LaunchError(
            f"no model of {options.repository} has its checkpoint: put one at {next(iter(found.values()))}"
        )


def check_settings(options: Options) -> None:
    """Raise LaunchError for an LLM that is to be served with settings that it would refuse: the server would say so for
    each of its instances, and for each ensemble over it."""
    for entry in catalog.entries(options.repository):
        served = entry.name in options.models if options.models else entry.awaits is None
        folder = options.repository / entry.name
        parameters = catalog.llm_parameters(folder) if served else None
        if parameters is not None:
            try:
                parse(parameters, folder)
            except SettingsError as error:
                raise LaunchError(f"model {entry.name}: {error}") from None


def check_ports(options: Options) -> None:
    """Raise LaunchError when another program listens on one of the ports, or two are the same."""
    ports = [("http", options.http_port), ("grpc", options.grpc_port)]
    if options.metrics_port:
        ports.append(("metrics", options.metrics_port))
    first: dict[int, str] = {}
    for name, port in ports:
        if port and first.setdefault(port, name) != name:
            raise LaunchError(f"--{first[port]}-port and --{name}-port are both {port}: give each its own")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server: a port of the past is free
            try:
                probe.bind((options.address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise LaunchError(f"--host {shown(options.host)}: this machine has no such address") from None
                raise LaunchError(
                    f"port {port} cannot be used ({error.strerror}): give another --{name}-port"
                ) from None


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def default_frontends() -> int:
    """Frontends of a new model: one sends about 10,000 responses/s, which an engine on a GPU outruns."""
    return 4 if has_gpu() else 2


def _assemble(backend: Path, stub: Path, target: Path) -> None:
    """Copy the backend and the stub to `target`; another process may be doing the same."""
    staging = target.with_name(f"{target.name}.{platform.node()}.{id(target)}")
    shutil.copytree(backend, staging, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(stub, staging / stub.name)
    try:
        staging.rename(target)
    except OSError:
        shutil.rmtree(staging)
        if not (target / stub.name).is_file():
            raise


def _in_virtual_environment() -> bool:
    return sys.prefix != sys.base_prefix
