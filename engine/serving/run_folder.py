"""The folder that the frontends of one model and its engine process meet in: sockets, the lock, the engine's state."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine import env
from engine.serving.process_watch import start_time

# Of a socket's path (unix(7)), without the zero at its end.
_MOST_BYTES = 107
_MANY_EPOCHS = 9999


class RunFolderError(Exception):
    """The run folder cannot be used; the message says why and what to do."""


class EngineState(msgspec.Struct, frozen=True):
    """Which engine process is the current one. `epoch` counts them. `failed` says why there will be no other."""

    epoch: int
    pid: int
    failed: str | None = None


class RunFolder:
    """One model of one tritonserver process: `root/PID-STARTED/KEY`.

    A frontend enters by leaving a mark with its pid and leaves by taking it away; the last to leave closes the engine
    and removes the folder, under a lock, so that a load that follows an unload finds nothing half gone.
    """

    def __init__(self, root: Path, server_pid: int, key: str) -> None:
        self._root = root
        self.server_pid = server_pid
        self.server_folder = root / f"{server_pid}-{start_time(server_pid)}"
        self.path = self.server_folder / key

    def enter(self) -> None:
        """Raises RunFolderError when the folder cannot be made, is another user's, who could answer for the engine, or
        is too deep for a socket."""
        remedy = f"set {env.RUN_DIR} to a short path of a folder of your own"
        if len(os.fsencode(self.engine_socket(_MANY_EPOCHS))) > _MOST_BYTES:
            raise RunFolderError(f"{self._root} is too long for the path of a socket ({_MOST_BYTES} bytes): {remedy}")
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = self._root.stat().st_uid
            if owner not in (0, os.getuid()):
                raise RunFolderError(f"{self._root} belongs to the user {owner}: {remedy}")
            with self._lock():
                sweep(self._root)
                if not self._others() and not self._engine_lives():
                    shutil.rmtree(self.path, ignore_errors=True)  # of frontends and an engine that were killed together
                self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._mark.touch()
        except OSError as error:
            raise RunFolderError(f"{self._root} cannot be used ({error.strerror}): {remedy}") from None

    @contextlib.contextmanager
    def leave(self) -> Iterator[bool]:
        """Take the mark away; the body runs under the lock, with True when nobody else is in the folder.

        The body closes the engine in that case; the folder goes after it.
        """
        with self._lock():
            self._mark.unlink(missing_ok=True)
            last = not self._others()
            yield last
            if last:
                shutil.rmtree(self.path, ignore_errors=True)
                with contextlib.suppress(OSError):  # another model of this server is still there
                    self.server_folder.rmdir()

    def remove_all(self) -> None:
        """Remove the folders of every model of this server, which is dead."""
        shutil.rmtree(self.server_folder, ignore_errors=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with open(self._root / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def try_lead(self) -> int | None:
        """A descriptor that holds the model's lock, or None while another frontend has it. Its death frees the lock."""
        descriptor = os.open(self.path / "leader", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def read_state(self) -> EngineState | None:
        try:
            return msgspec.json.decode((self.path / "state").read_bytes(), type=EngineState)
        except FileNotFoundError:
            return None

    def write_state(self, state: EngineState) -> None:
        self._replace("state", msgspec.json.encode(state))

    def read_failure(self, epoch: int) -> str | None:
        """The sentence that engine `epoch` left when it could not start."""
        try:
            return (self.path / f"failure-{epoch}").read_text()
        except FileNotFoundError:
            return None

    def write_failure(self, epoch: int, sentence: str) -> None:
        self._replace(f"failure-{epoch}", sentence.encode())

    def config_file(self) -> Path:
        return self.path / "config.json"

    def engine_socket(self, epoch: int) -> str:
        """A fresh one an epoch, so that nothing of an old engine reaches a request that was sent again."""
        return f"{self.path}/e{epoch}"

    @property
    def _mark(self) -> Path:
        return self.path / f"frontend-{os.getpid()}"

    def _others(self) -> bool:
        pids = [int(mark.name.partition("-")[2]) for mark in self.path.glob("frontend-*")]
        return any(start_time(pid) is not None for pid in pids if pid != os.getpid())

    def _engine_lives(self) -> bool:
        state = self.read_state()
        return state is not None and state.failed is None and start_time(state.pid) is not None

    def _replace(self, name: str, data: bytes) -> None:
        staged = self.path / f".{name}.{os.getpid()}"
        staged.write_bytes(data)
        staged.replace(self.path / name)


def without_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model's configuration all its instances have in common, also those of a load that changes their
    number."""
    return {key: value for key, value in config.items() if key != "instance_group"}


def model_key(name: str, version: str, config: Mapping[str, Any], checkpoint: Path) -> str:
    """A short folder name for all frontends that can share an engine process: those of one model, version,
    configuration and state of the checkpoint's files.

    config: as Triton gives it to an instance. Its instance groups do not count: frontends come and go beside others.
    """
    lasting = without_groups(config)
    changed = max((file.stat().st_mtime_ns for file in checkpoint.glob("*") if file.is_file()), default=0)
    parts = (name, version, json.dumps(lasting, sort_keys=True), str(changed))  # the server orders its maps by chance
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def sweep(root: Path) -> None:
    """Remove what servers that are gone left behind (a killed server cleans nothing up)."""
    for folder in root.glob("*-*"):
        pid, _, started = folder.name.partition("-")
        if pid.isdigit() and start_time(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)
