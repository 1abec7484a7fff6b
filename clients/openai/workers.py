"""Run the shim: one process, or several that share one port."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import connection
from types import FrameType

import uvicorn

from clients.openai.config import ShimConfig
from clients.openai.protocol import protocol_of
from engine import heap
from engine.plain import log_to_stderr

log = logging.getLogger("nereid.openai")

_BACKLOG = 2048
_RESTART_S = 1.0  # between two starts in one place
_LOOK_S = 0.05  # between looks while one is missing
_DRAIN_S = 30


@dataclass(frozen=True)
class _Worker:
    """listener: its socket, of which the supervisor has a copy until it ends; started: when, by the clock that does not
    jump."""

    process: multiprocessing.process.BaseProcess
    listener: socket.socket
    started: float


def serve(config: ShimConfig, log_level: str = "info") -> None:
    """Serve until SIGTERM or SIGINT, then let open requests end. Raises ValueError when the port is taken or the files
    for TLS cannot be used."""
    _check_tls(config)
    _check_address(config)
    _begin_log(log_level)
    log.info(addresses(config))
    if config.workers == 1:
        _work(config, log_level, None, _listen(config))
        return
    folder = tempfile.mkdtemp(prefix="nereid-openai-")
    # prometheus_client reads this when a worker imports it; the workers' files in it add up to one page.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    try:
        _supervise(config, log_level, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def addresses(config: ShimConfig) -> str:
    """Where a client and a browser of this machine find what is served."""
    host = {"0.0.0.0": "localhost", "127.0.0.1": "localhost", "::": "localhost"}.get(config.host, config.host)
    scheme = "http" if config.tls_certificate is None else "https"
    base = f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.port}"
    page = f", the chat page at {base}/, calls to try at {base}/docs" if config.web else ""
    return f"the API is at {base}/v1{page}"


def _begin_log(level: str) -> None:
    log_to_stderr("%(asctime)s %(name)s %(levelname)s %(message)s", level.upper())
    logging.getLogger("httpx").setLevel(logging.WARNING)


def _check_address(config: ShimConfig) -> None:
    """A port that somebody else listens on is noticed here."""
    try:
        _bind(config, shared=False).close()
    except (OSError, UnicodeError) as error:  # of a name that is none; of one that cannot be written as one
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(
            f"nothing can listen at --host {config.host} and --port {config.port} ({why}): give an address of this "
            "machine and a port that is free"
        ) from None


def _check_tls(config: ShimConfig) -> None:
    """Here, before workers fail on it one after the other."""
    if config.tls_certificate is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a passphrase the key would be asked for at the terminal, by every worker.
        context.load_cert_chain(config.tls_certificate, config.tls_key, password="")
    except ssl.SSLError as error:
        raise ValueError(
            f"--tls-certificate {config.tls_certificate} and --tls-key {config.tls_key} are not a certificate and its "
            f"key in PEM form, without a passphrase ({error})"
        ) from None
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except ssl.SSLError as error:
            raise ValueError(
                f"--tls-client-ca {config.tls_client_ca} holds no certificate in PEM form ({error})"
            ) from None


def _bind(config: ShimConfig, shared: bool) -> socket.socket:
    """A bound socket. shared: each worker has one of its own and the kernel deals connections out evenly; of one socket
    for all, the worker that wakes first would take every connection that is waiting."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((config.host, config.port))
    return listener


def _listen(config: ShimConfig) -> socket.socket:
    """A worker's socket. Connections wait in it from now on, before there is a worker."""
    listener = _bind(config, shared=config.workers > 1)
    listener.listen(_BACKLOG)
    return listener


def _listens(worker: _Worker) -> bool:
    """Whether the kernel deals connections out to it."""
    return worker.process.is_alive() and bool(worker.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _work(config: ShimConfig, log_level: str, metrics_folder: str | None, listener: socket.socket) -> None:
    """One worker, in this process."""
    from clients.openai.app import create_app  # imports prometheus_client: the folder must be set before

    _begin_log(log_level)
    app = create_app(config, metrics_folder)
    heap.freeze()
    heap.collect_often()
    heap.keep_trimmed()
    settings = uvicorn.Config(
        app,
        http=protocol_of(config),
        ws="none",
        log_level=log_level,
        access_log=False,  # the gate writes one line a request, with the model and the token counts
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        ssl_certfile=config.tls_certificate,
        ssl_keyfile=config.tls_key,
        ssl_ca_certs=config.tls_client_ca,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
    )
    uvicorn.Server(settings).run(sockets=[listener])


def _supervise(config: ShimConfig, log_level: str, folder: str) -> None:
    spawn = multiprocessing.get_context("spawn")  # gRPC does not survive a fork
    stopping = False

    def start(listener: socket.socket) -> _Worker:
        process = spawn.Process(target=_work, args=(config, log_level, folder, listener))
        process.start()
        return _Worker(process, listener, time.monotonic())

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    workers = [start(_listen(config)) for _ in range(config.workers)]
    while not stopping:
        living = [worker.process.sentinel for worker in workers if worker.process.is_alive()]
        connection.wait(living, _RESTART_S if len(living) == len(workers) else _LOOK_S)
        ended = [place for place, worker in enumerate(workers) if not worker.process.is_alive()]
        for place in ended:
            workers[place].listener.close()  # who waits in it is told so, and asks another
        if not any(_listens(worker) for worker in workers):
            for worker in workers:
                if worker.process.is_alive():
                    worker.listener.listen(_BACKLOG)
        for place in ended:
            process = workers[place].process
            if not stopping and time.monotonic() > workers[place].started + _RESTART_S:
                log.error("worker %s ended with status %s; starting another", process.pid, process.exitcode)
                # While others listen it does not until it is ready: connections would wait for it in vain.
                others = any(_listens(worker) for worker in workers)
                workers[place] = start(_bind(config, shared=True) if others else _listen(config))
    for worker in workers:
        worker.listener.close()
        if worker.process.pid is not None and worker.process.is_alive():
            os.kill(worker.process.pid, signal.SIGTERM)
    for worker in workers:
        worker.process.join(_DRAIN_S + 5)
        if worker.process.is_alive():
            worker.process.kill()
