"""The folder that the frontends of one model and its engine process meet in: sockets, the lock, the engine's state."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from engine import env
from engine.config import EngineConfig
from engine.serving.link.process_watch import start_time

# Of a socket's path (unix(7)), without the zero at its end.
_MAX_BYTES = 107
_MANY_EPOCHS = 9999
_MAX_SENTENCE = 3000  # characters; the target of a symbolic link has at most 4,095 bytes

logger = logging.getLogger("nereid.run_folder")


class RunFolderError(Exception):
    """The run folder cannot be used; the message says why and what to do."""


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """Which engine process is the current one. `epoch` counts them. `failed` says why there will be no other."""

    epoch: int
    pid: int
    failed: str | None = None


class RunFolder:
    """One model of one tritonserver process: `root/PID-STARTED/KEY`.

    A frontend enters by leaving a mark with its pid and leaves by taking it away; the last to leave closes the engine
    and removes the folder, under a lock, so that a load that follows an unload finds nothing half gone.

    The folder may be swept away and its disk may be full while the model is served: frontends make it again, what is
    kept in it needs names and no bytes, and a process remembers the last state that it has seen.
    """

    def __init__(self, root: Path, server_pid: int, key: str) -> None:
        self._root = root
        self.server_pid = server_pid
        self.server_folder = _server_folder(root, server_pid)
        self.path = self.server_folder / key
        self._seen: EngineState | None = None
        self._served = False

    def enter(self) -> None:
        """Raises RunFolderError when the folder cannot be made, is another user's, who could answer for the engine, or
        is too deep for a socket."""
        remedy = f"set {env.RUN_DIR} to a short path of a folder of your own"
        if len(os.fsencode(self.engine_socket(_MANY_EPOCHS))) > _MAX_BYTES:
            raise RunFolderError(f"{self._root} is too long for the path of a socket ({_MAX_BYTES} bytes): {remedy}")
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            owner = self._root.stat().st_uid
            if owner not in (0, os.getuid()):
                raise RunFolderError(f"{self._root} belongs to the user {owner}: {remedy}")
            with self._lock():
                sweep(self._root)
                if not self.others() and not self._engine_lives():
                    shutil.rmtree(self.path, ignore_errors=True)  # of frontends and an engine that were killed together
                    self._seen = None
                self.restore()
        except OSError as error:
            raise RunFolderError(f"{self._root} cannot be used ({error.strerror}): {remedy}") from None

    @contextlib.contextmanager
    def leave(self) -> Iterator[bool]:
        """Take the mark away; the body runs under the lock, with True when nobody else is in the folder.

        The body closes the engine in that case; the folder goes after it.
        """
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(self._lock())
                self._mark.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be used (%s): it is left all the same", self._root, error.strerror)
            with contextlib.suppress(OSError):
                (self.path / f"left-{os.getpid()}").touch()
            last = not self.others()
            yield last
            if last:
                shutil.rmtree(self.path, ignore_errors=True)
                self._remove_server_folder()

    def _remove_server_folder(self) -> None:
        with contextlib.suppress(OSError):
            if [entry.name for entry in self.server_folder.iterdir()] in ([], ["end"]):  # else other models are there
                shutil.rmtree(self.server_folder, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove the folders of every model of this server, which is dead."""
        shutil.rmtree(self.server_folder, ignore_errors=True)

    def restore(self) -> None:
        """Make the folder and this frontend's mark where they are missing. Raises OSError."""
        if not self._mark.exists():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._mark.touch()
            (self.path / f"left-{os.getpid()}").unlink(missing_ok=True)
            if self._served:
                (self.path / "served").touch()

    def must_end_streams(self) -> bool:
        """Whether the server's exit timeout is nearly over (`end_streams`)."""
        return (self.server_folder / "end").exists()

    def tell_served(self) -> None:
        """An engine of this model takes requests, or has: frontends that come later may hear of it. Raises OSError."""
        if not self._served:
            (self.path / "served").touch()
            self._served = True

    def has_served(self) -> bool:
        """Whether this frontend or another that lives has told so."""
        return self._served or (self.path / "served").exists()

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._root / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def try_lead(self) -> int | None:
        """A descriptor that holds the model's lock, or None while another frontend has it. Its death frees the lock.

        Raises OSError when the folder cannot be used.
        """
        with contextlib.suppress(OSError):  # without room for a mark there may be a lock
            self.restore()
        descriptor = os.open(self.path / "leader", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def holds(self, lock: int) -> bool:
        """Whether what `try_lead` gave still keeps others from the lead: not when its file has been removed."""
        try:
            return os.path.samestat(os.stat(self.path / "leader"), os.fstat(lock))
        except OSError:
            return False

    def read_state(self) -> EngineState | None:
        """The newest state that this process can know of."""
        try:
            written = msgspec.json.decode(os.readlink(os.fsencode(self.path / "state")), type=EngineState)
        except OSError:
            return self._seen
        seen = self._seen
        if seen is None or written.epoch > seen.epoch or (written.epoch == seen.epoch and seen.failed is None):
            self._seen = written
        return self._seen

    def write_state(self, state: EngineState) -> None:
        """Raises OSError; this process knows the state even so.

        The state is the target of a symbolic link: a short one stands in the link itself, so it takes no room on a
        disk that is full.
        """
        self._seen = state
        if state.failed is None:
            self._link(state)
            return
        try:
            self._link(msgspec.structs.replace(state, failed=state.failed[:_MAX_SENTENCE]))
        except OSError as error:
            self._link(msgspec.structs.replace(state, failed=f"{error.strerror}; the log says more"))

    def engines(self) -> list[EngineState]:
        """Engine processes of this model that are alive, by age, whatever the folder says: each is known by its
        command line, `… ROOT SERVER_PID KEY EPOCH MODEL_NAME`."""
        known = [str(self._root), str(self.server_pid), self.path.name]
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            words = _command(entry)
            if words[-5:-2] == known and words[-2].isdigit() and start_time(int(entry.name)) is not None:
                found.append(EngineState(int(words[-2]), int(entry.name)))
        return sorted(found, key=lambda state: state.epoch)

    def read_failure(self, epoch: int) -> str | None:
        """The sentence that engine `epoch` left when it could not start."""
        try:
            return (self.path / f"failure-{epoch}").read_text() or None
        except OSError:
            return None

    def write_failure(self, epoch: int, sentence: str) -> None:
        """Raises OSError."""
        staged = self.path / f".failure-{epoch}"
        staged.write_text(sentence, errors="backslashreplace")  # a checkpoint's text may hold half a character
        staged.replace(self.path / f"failure-{epoch}")

    def engine_socket(self, epoch: int) -> str:
        """A fresh one an epoch, so that nothing of an old engine reaches a request that was sent again."""
        return f"{self.path}/e{epoch}"

    @property
    def _mark(self) -> Path:
        return self.path / f"frontend-{os.getpid()}"

    def other_stubs(self) -> bool:
        """Whether another instance of this model, of whatever configuration, runs in this server and has not left.

        Asked under the lock (`leave`): who enters later waits for it. Marks may be missing, so the processes count."""
        own = _command(Path("/proc/self"))[:2]  # the stub and its model.py
        for entry in Path("/proc").glob("[0-9]*"):
            words = _command(entry)
            if words[:2] != own or str(self.server_pid) not in words or int(entry.name) == os.getpid():
                continue
            if start_time(int(entry.name)) is not None and not (self.path / f"left-{entry.name}").exists():
                return True
        return False

    def others(self) -> bool:
        pids = [int(mark.name.partition("-")[2]) for mark in self.path.glob("frontend-*")]
        return any(start_time(pid) is not None for pid in pids if pid != os.getpid())

    def _engine_lives(self) -> bool:
        state = self.read_state()
        return state is not None and state.failed is None and start_time(state.pid) is not None

    def _link(self, state: EngineState) -> None:
        staged = self.path / f".state.{os.getpid()}"
        staged.unlink(missing_ok=True)
        os.symlink(msgspec.json.encode(state), os.fsencode(staged))
        staged.replace(self.path / "state")


def end_streams(root: Path, server_pid: int) -> None:
    """Have every frontend of a server that is about to exit end its streams. Does nothing where the server has none, or
    the folder cannot be written."""
    with contextlib.suppress(OSError):
        (_server_folder(root, server_pid) / "end").touch()


def _server_folder(root: Path, server_pid: int) -> Path:
    return root / f"{server_pid}-{start_time(server_pid)}"


def without_groups(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a model's configuration all its instances have in common, also those of a load that changes their
    number."""
    return {key: value for key, value in config.items() if key != "instance_group"}


def model_key(name: str, version: str, config: EngineConfig) -> str:
    """A short folder name for all frontends that can share an engine process: those of one model, version, settings of
    the engine and state of the checkpoint's files. Frontends come and go beside others, with settings of their own."""
    checkpoint = Path(config.model)
    changed = max((file.stat().st_mtime_ns for file in checkpoint.glob("*") if file.is_file()), default=0)
    parts = (name, version, msgspec.json.encode(config).decode(), str(changed))
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def sweep(root: Path) -> None:
    """Remove what servers that are gone left behind (a killed server cleans nothing up)."""
    for folder in root.glob("*-*"):
        pid, _, started = folder.name.partition("-")
        if pid.isdigit() and start_time(int(pid)) != started:
            shutil.rmtree(folder, ignore_errors=True)


def _command(process: Path) -> list[str]:
    """The command line of a folder of /proc; nothing of one that has ended."""
    try:
        return os.fsdecode((process / "cmdline").read_bytes()).split("\0")[:-1]
    except OSError:
        return []
