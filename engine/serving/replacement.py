"""Replace instances of models whose Python stub has died, through the server's own repository API.

tritonserver 2.51 never starts a dead stub again: it goes on to send it its share of the requests and refuses each after
a second. But a load whose configuration differs in instance groups alone is carried out in place: instances of groups
that stay go on with what they run. So the group of a dead stub is loaded away, which ends its share at once, and back,
which starts a new stub. Where no instance is left, each group is loaded under a new host policy: equal ones stay.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.serving.process_watch import ProcessWatch, parent
from engine.serving.run_folder import without_groups

_STUB = "triton_python_backend_stub"
_LOOK_S = 0.5  # between looks for stubs that are new
_REAP_S = 0.1  # the server collects a stub that it ended itself within milliseconds; one that died stays a zombie
_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_STEADY_S = 60.0  # a death so long after the last one begins a new row
_LOAD_S = 300.0  # a load waits for the new instance, which may wait for an engine process
_ASK_S = 10.0

Config = dict[str, Any]  # a model's configuration as the server tells it


class RepositoryError(Exception):
    """The server did not do what its repository API was asked for; the message is the server's."""


@dataclass(frozen=True)
class Stub:
    """A process that runs one instance of a Python model."""

    pid: int
    model: str
    instance: str

    @property
    def group(self) -> str:
        """The server names instances GROUP_NUMBER."""
        return self.instance.rpartition("_")[0]


@dataclass
class _Loss:
    """What a model has lost. whole: its configuration before, until it is back; deaths: in a row, those at once as one;
    due: when to start others."""

    whole: Config | None = None
    deaths: int = 0
    last: float = -_STEADY_S
    due: float = 0.0


class Repository:
    """The part of a server's HTTP API that is needed here. Raises RepositoryError."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v2"

    def config(self, model: str) -> Config | None:
        """The configuration that a model runs with; None when the model is not ready."""
        try:
            self._ask(f"models/{model}/ready")
            config: Config = json.loads(self._ask(f"models/{model}/config"))
        except urllib.error.HTTPError:
            return None
        except OSError as error:
            raise RepositoryError(str(error)) from None
        return config

    def load(self, model: str, config: Config) -> None:
        body = {"parameters": {"config": json.dumps(config)}}
        try:
            self._ask(f"repository/models/{model}/load", json.dumps(body).encode(), _LOAD_S)
        except urllib.error.HTTPError as error:
            raise RepositoryError(error.read().decode(errors="replace").strip() or str(error)) from None
        except OSError as error:
            raise RepositoryError(str(error)) from None

    def _ask(self, path: str, body: bytes | None = None, timeout_s: float = _ASK_S) -> bytes:
        with urllib.request.urlopen(f"{self._url}/{path}", body, timeout_s) as answer:
            return bytes(answer.read())


class Replacement:
    """Watches the stubs of one server on a thread of its own, between `start` and `close`.

    say: where sentences about deaths and replacements go. limit: deaths in a row, each within a minute of the one
    before, after which a model's dead instances are taken out and no longer replaced.
    """

    def __init__(self, server_pid: int, repository: Repository, say: Callable[[str], None], limit: int = 10) -> None:
        self._server_pid = server_pid
        self._repository = repository
        self._say = say
        self._limit = limit
        self._stubs: dict[int, tuple[Stub, ProcessWatch]] = {}
        self._strangers: set[int] = set()  # processes that are no children of the server
        self._losses: dict[str, _Loss] = {}
        self._renewals = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nereid-replacement", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Replace nothing more. A load that is under way is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._find()
            self._wait()
            for stub in self._died():
                self._mourn(stub)
            for model, loss in list(self._losses.items()):
                if loss.whole is not None and time.monotonic() >= loss.due:
                    self._put_back(model, loss, loss.whole)

    def _find(self) -> None:
        """Look for stubs that have been started."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= pids
        for pid in pids - self._strangers - self._stubs.keys():
            if parent(pid) != self._server_pid:
                self._strangers.add(pid)
            elif (stub := read_stub(pid)) is not None:
                self._stubs[pid] = (stub, ProcessWatch(pid))

    def _wait(self) -> None:
        """Until a stub ends, or it is time to look around again."""
        descriptors = [watch.fd for _, watch in self._stubs.values() if watch.fd is not None]
        if descriptors:
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(_LOOK_S * 1000)
        else:
            self._closing.wait(_LOOK_S)

    def _died(self) -> list[Stub]:
        """Stubs that ended since the last look and that the server did not end itself."""
        ended = [(stub, watch) for stub, watch in self._stubs.values() if watch.dead()]
        for stub, watch in ended:
            watch.close()
            del self._stubs[stub.pid]
        if ended:
            self._closing.wait(_REAP_S)
        return [stub for stub, _ in ended if parent(stub.pid) == self._server_pid]

    def _living(self, model: str) -> set[str]:
        """Groups of a model that have a living stub."""
        return {stub.group for stub, watch in self._stubs.values() if stub.model == model and not watch.dead()}

    def _mourn(self, dead: Stub) -> None:
        """Have the dead stub's group taken out, and settle when to put it back."""
        self._find()
        try:
            config = self._repository.config(dead.model)
        except RepositoryError as error:
            self._fail(dead.model, error)
            return
        if config is None or dead.group not in names(config["instance_group"]):
            return  # the server says itself that the model did not load, or the model is being unloaded
        living = self._living(dead.model)
        if dead.group in living:
            self._say(
                f"{dead.model}: instance {dead.instance} died and cannot be replaced, for others of its instance group "
                "live. Its share of the requests fails until the model is unloaded and loaded. Give each instance a "
                "group of its own, as `nereid add` does"
            )
            return
        self._say(f"{dead.model}: instance {dead.instance} (pid {dead.pid}) died; another takes its place")
        loss = self._losses.setdefault(dead.model, _Loss())
        if loss.whole is None:  # else another start is due already
            if time.monotonic() - loss.last > _STEADY_S:
                loss.deaths = 0
            loss.whole = config
            self._put_off(dead.model, loss)
        self._take_out(dead.model, config)

    def _take_out(self, model: str, config: Config) -> None:
        """Let the server send no more requests to groups that are dead, unless all are."""
        living = self._living(model)
        left = [group for group in config["instance_group"] if group["name"] in living]
        if left and len(left) < len(config["instance_group"]):
            self._load(model, {**config, "instance_group": left})

    def _put_back(self, model: str, loss: _Loss, whole: Config) -> None:
        """Start what is missing."""
        try:
            config = self._repository.config(model)
        except RepositoryError as error:
            self._fail(model, error)
            self._put_off(model, loss)
            return
        if config is None or without_groups(config) != without_groups(whole):
            loss.whole = None  # somebody has unloaded the model, or loaded another configuration
            return
        self._take_out(model, config)  # what was put back may have died before it was seen
        living = self._living(model)
        present = {group["name"]: group for group in config["instance_group"]}
        groups = [present.get(group["name"], group) for group in whole["instance_group"]]
        if not living & names(groups):
            self._renewals += 1
            groups = [renewed(group, self._renewals) for group in groups]
        loaded = self._load(model, {**whole, "instance_group": groups})
        self._find()
        if loaded and names(groups) <= self._living(model):
            loss.whole = None
            self._say(f"{model}: its instances are complete again")
        else:
            self._put_off(model, loss)

    def _put_off(self, model: str, loss: _Loss) -> None:
        """Wait the longer for the next start the more there were, and no more for it after too many."""
        loss.deaths += 1
        loss.last = time.monotonic()
        loss.due = loss.last + _BACKOFF_S[min(loss.deaths, len(_BACKOFF_S)) - 1]
        if loss.deaths > self._limit:
            loss.whole = None
            self._say(
                f"{model}: instances died {loss.deaths} times in a row, so they are not replaced any more. When the "
                "cause is found, unload the model and load it"
            )

    def _load(self, model: str, config: Config) -> bool:
        try:
            self._repository.load(model, config)
        except RepositoryError as error:
            self._fail(model, error)
            return False
        return True

    def _fail(self, model: str, error: RepositoryError) -> None:
        if not self._closing.is_set():
            self._say(f"{model}: the server did not replace a dead instance: {error}")


def names(groups: Iterable[Config]) -> set[str]:
    return {str(group["name"]) for group in groups}


def renewed(group: Config, number: int) -> Config:
    """The same group under a host policy that it never had, so that the server makes its instances anew: to load what
    it has, or has tried, changes nothing. number: of the renewal, another one each time."""
    policy = str(group.get("host_policy", "")).partition("+")[0]
    return {**group, "host_policy": f"{policy}+{number}"}


def read_stub(pid: int) -> Stub | None:
    """What a process runs, out of its command line; None when it is no stub (yet).

    The server calls STUB MODEL_PY REGION SIZE GROWTH SERVER_PID BACKEND HANDLE INSTANCE RUNTIME.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    if len(words) < 9 or not words[0].endswith(_STUB):
        return None
    return Stub(pid, Path(words[1]).parts[-3], words[8])
