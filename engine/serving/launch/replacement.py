"""Replace instances of models whose Python stub has died, through the server's own repository API.

tritonserver 2.51 never starts a dead stub again: it goes on to send it its share of the requests and refuses each after
a second. But a load whose configuration differs in instance groups alone is carried out in place: instances of groups
that stay go on with what they run. So the group of a dead stub is loaded away, which ends its share at once, and back,
which starts a new stub. Where no instance is left, each group is loaded under a new host policy: equal ones stay. A
load that fails leaves the configuration of before, with its dead instances, and the model READY.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.serving.launch import guard, stub_rescue
from engine.serving.link.process_watch import ProcessWatch, parent, start_time
from engine.serving.link.run_folder import without_groups

_STUB = "triton_python_backend_stub"
_LOOK_S = 0.5  # between looks for stubs that are new
_LOOK_BUSY_S = 0.01  # the same while some are started
_RELEASE_S = 0.25  # between looks for what the server waits for with the dead
_STUCK_S = 2.0  # that a load needs at most until an instance of it lives
_SETTLE_S = 1.0  # after the last instance of a load was ready (stub_rescue)
_ORPHAN_S = 1.0  # between looks for stubs that died before they were seen
_REAP_S = 0.1  # the server collects a stub that it ended itself within milliseconds; one that died stays a zombie
_BACKOFF_S = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_LONG_S = 10.0  # waits that are worth a sentence
_STEADY_S = 60.0  # a death so long after the last one begins a new row
_LOAD_S = 300.0  # a load waits for the new instance, which may wait for an engine process
_ASK_S = 10.0
_READY, _LOADING = "READY", "LOADING"

Config = dict[str, Any]  # a model's configuration as the server tells it


class RepositoryError(Exception):
    """The server did not do what its repository API was asked for; the message is the server's."""


@dataclass(frozen=True)
class Stub:
    """A process that runs one instance of a Python model. region, control: where it meets the server (stub_rescue);
    born: when it was started, in clock ticks since boot."""

    pid: int
    born: int
    model: str
    instance: str
    region: str
    control: int

    @property
    def group(self) -> str:
        """The server names instances GROUP_NUMBER."""
        return self.instance.rpartition("_")[0]


@dataclass
class _Loss:
    """What a model has lost. whole: its configuration before, until it is back; arranged: names of groups that it was
    given meanwhile; dead: stubs whose end was not looked into yet; deaths: in a row, those at once as one; due: when to
    start others; mending: a thread is at it; loading: since when a load is under way."""

    whole: Config | None = None
    arranged: list[set[str]] = field(default_factory=list)
    dead: list[Stub] = field(default_factory=list)
    deaths: int = 0
    last: float = -_STEADY_S
    due: float = 0.0
    mending: bool = False
    loading: float | None = None


class Repository:
    """The part of a server's HTTP API that is needed here. Raises RepositoryError."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._url = f"http://{host}:{port}/v2"

    def state(self, model: str) -> str:
        """What the server's index says of a model: READY with dead instances too, also after a load that failed."""
        try:
            index: list[dict[str, str]] = json.loads(self._ask("repository/index", b"{}"))
        except (OSError, ValueError) as error:
            raise RepositoryError(str(error)) from None
        return next((entry.get("state", "") for entry in index if entry["name"] == model), "")

    def config(self, model: str) -> Config | None:
        """The configuration that a model runs with; None when it is not there."""
        try:
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

    say: where sentences about deaths and replacements go.
    """

    def __init__(self, server_pid: int, repository: Repository, say: Callable[[str], None]) -> None:
        self._server_pid = server_pid
        self._repository = repository
        self._say = say
        self._stubs: dict[int, tuple[Stub, ProcessWatch]] = {}
        self._strangers: set[int] = set()  # processes that are no children of the server
        self._control = 0  # of all stubs of a server it is the same
        # By model and instance, dead or alive. A load that changes more than groups starts a second set of the same
        # names, and the first lives on until its streams end: of two of one name the newer counts.
        self._newest: dict[tuple[str, str], Stub] = {}
        self._dead: list[Stub] = []  # that the server may still wait for
        self._released = 0.0
        self._started: set[int] = set()  # stubs whose model is initialized
        self._starting: dict[str, float] = {}  # by model: when a stub was last seen to be started
        self._orphans: dict[str, float] = {}  # regions, and since when they are nobody's
        self._looked = 0.0
        self._looks = 0
        self._lock = threading.Lock()  # over the losses
        self._losses: dict[str, _Loss] = {}
        self._renewals = itertools.count(1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nereid-replacement", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Replace nothing more. A load that is under way is not waited for."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._find()
                self._wait()
                for stub in self._died():
                    self._mourn(stub)
                self._note_starts()
                if self._dead and time.monotonic() > self._released + _RELEASE_S:
                    self._release()
                if time.monotonic() > self._looked + _ORPHAN_S:
                    self._free_orphans()
            except OSError as error:  # as when descriptors run out: nobody else does this work
                self._say(f"instances cannot be watched at the moment: {error}")
                self._closing.wait(_LOOK_S)

    def _find(self) -> None:
        """Look for stubs that have been started."""
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._strangers &= pids
        for pid in pids - self._strangers - self._stubs.keys():
            if parent(pid) != self._server_pid:
                self._strangers.add(pid)
            elif (stub := read_stub(pid)) is not None:
                self._stubs[pid] = (stub, ProcessWatch(pid))
                self._newest = newest_by_instance([*self._newest.values(), stub])
                self._control = stub.control
        self._looks += 1

    def _wait(self) -> None:
        """Until a stub ends, or it is time to look around again."""
        pause = _LOOK_BUSY_S if any(loss.mending for loss in self._losses.values()) else _LOOK_S
        descriptors = [watch.fd for _, watch in self._stubs.values() if watch.fd is not None]
        if descriptors:
            poll = select.poll()
            for descriptor in descriptors:
                poll.register(descriptor, select.POLLIN)
            poll.poll(pause * 1000)
        else:
            self._closing.wait(pause)

    def _died(self) -> list[Stub]:
        """Stubs that ended since the last look and that the server did not end itself."""
        ended = [(stub, watch) for stub, watch in self._stubs.values() if watch.dead()]
        for stub, watch in ended:
            watch.close()
            del self._stubs[stub.pid]
        if not ended:
            return []
        self._closing.wait(_REAP_S)
        died = [stub for stub, _ in ended if parent(stub.pid) == self._server_pid]
        gone = {stub.pid for stub, _ in ended} - {stub.pid for stub in died}
        self._newest = {key: stub for key, stub in self._newest.items() if stub.pid not in gone}
        return died

    def _note_starts(self) -> None:
        for stub, _ in self._stubs.values():
            if stub.pid not in self._started:
                if stub_rescue.starts(stub.region, stub.control):
                    self._starting[stub.model] = time.monotonic()
                else:
                    self._started.add(stub.pid)

    def _release(self) -> None:
        """Free the server of the dead."""
        for stub in self._dead:
            if self._stuck(stub):
                stub_rescue.refuse(stub.region, stub.control, f"Stub process '{stub.instance}' is not healthy.")
        self._dead = [stub for stub in self._dead if self._held(stub) or stub_rescue.release(stub.region, stub.control)]
        self._started &= self._stubs.keys() | {stub.pid for stub in self._dead}
        self._released = time.monotonic()

    def _stuck(self, dead: Stub) -> bool:
        """Whether a load may wait for a dead instance that works off what waits for the model, as no other does."""
        loss = self._losses.get(dead.model)
        since = None if loss is None else loss.loading
        if dead.pid not in self._started or since is None or time.monotonic() < since + _STUCK_S:
            return False
        return not any(stub.model == dead.model for stub, _ in self._stubs.values())

    def _held(self, dead: Stub) -> bool:
        """Whether one died while it was started, and others of its load are not ready yet, or were not a moment ago."""
        return dead.pid not in self._started and time.monotonic() < self._starting.get(dead.model, 0.0) + _SETTLE_S

    def _living(self, model: str) -> set[str]:
        """Groups of a model that have a living stub of their own set at this moment."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        stubs = [read_stub(pid) for pid in pids if parent(pid) == self._server_pid]
        return self._groups(model, [stub for stub in stubs if stub is not None])

    def _groups(self, model: str, living: list[Stub]) -> set[str]:
        """Groups of a model of which the newest of an instance is among `living`."""
        newest = newest_by_instance([*self._newest.values(), *living]).values()
        pids = {stub.pid for stub in living}
        return {stub.group for stub in newest if stub.model == model and stub.pid in pids}

    def _watched(self, model: str) -> set[str]:
        """Groups of a model that have a living stub of their own set which is watched, after a look that begins from
        now on."""
        looks = self._looks
        while self._looks < looks + 2 and not self._closing.wait(_LOOK_BUSY_S):
            pass
        stubs = [stub for stub, _ in list(self._stubs.values())]
        return self._groups(model, [stub for stub in stubs if read_stub(stub.pid) is not None])

    def _free_orphans(self) -> None:
        """Free the server of stubs that died before they were seen: their regions are nobody's for a while."""
        mapped = guard.regions(self._server_pid) or set()
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        words = [_command(pid) for pid in pids if parent(pid) == self._server_pid]  # of shells that become stubs too
        words += [stub.region for stub in self._dead]
        now = self._looked = time.monotonic()
        orphans = {region for region in mapped if not any(region in command for command in words)}
        self._orphans = {region: self._orphans.get(region, now) for region in orphans}
        for region, since in self._orphans.items():
            if now >= since + _ORPHAN_S and not self._any_starts():  # their model is not known
                stub_rescue.release(region, self._control)

    def _any_starts(self) -> bool:
        return time.monotonic() < max(self._starting.values(), default=0.0) + _SETTLE_S

    def _mourn(self, dead: Stub) -> None:
        """Have the model of a dead stub mended."""
        self._dead.append(dead)
        with self._lock:
            loss = self._losses.setdefault(dead.model, _Loss())
            loss.dead.append(dead)
            if loss.mending:
                return
            loss.mending = True
        threading.Thread(target=self._mend, args=(dead.model, loss), name="nereid-mend", daemon=True).start()

    def _mend(self, model: str, loss: _Loss) -> None:
        """Until the model is whole again or somebody else decides about it. A load waits for the new instances, so each
        model that has lost some has a thread for this."""
        while not self._closing.is_set():
            try:
                over = self._try(model, loss)
            except (RepositoryError, OSError) as error:
                over = False
                self._fail(model, error)
                self._put_off(loss)
            if not over:
                self._closing.wait(max(0.0, loss.due - time.monotonic()))
                continue
            with self._lock:
                loss.whole = None
                loss.mending = bool(loss.dead)
                if not loss.mending:
                    return

    def _try(self, model: str, loss: _Loss) -> bool:
        """Take out what is dead and start what is missing. True when there is nothing more to do."""
        with self._lock:
            dead, loss.dead = loss.dead, []
        state = self._repository.state(model)
        if state == _LOADING:
            loss.dead += dead
            loss.due = time.monotonic() + _LOOK_S
            return False
        config = self._repository.config(model) if state == _READY else None
        if config is None:
            return True  # the server says itself that the model did not load, or somebody has unloaded it
        whole = loss.whole
        if whole is None:
            whole = self._begin(loss, config)
        elif without_groups(config) != without_groups(whole):
            return True  # somebody has loaded another configuration
        elif names(config["instance_group"]) not in loss.arranged:
            whole = loss.whole = config  # somebody has loaded it with other groups
        living = self._living(model)
        missing = names(whole["instance_group"]) - living
        self._announce(model, dead, living, whole)
        if not missing:
            return True
        groups = self._take_out(model, loss, config, living)
        if loss.due > time.monotonic():
            return False  # others may die until then
        return self._put_back(model, loss, whole, groups)

    def _begin(self, loss: _Loss, config: Config) -> Config:
        """The first death for a while, or ever."""
        loss.whole = config
        loss.arranged = [names(config["instance_group"])]
        if time.monotonic() - loss.last > _STEADY_S:
            loss.deaths = 0
        self._put_off(loss)
        return config

    def _announce(self, model: str, dead: Iterable[Stub], living: set[str], whole: Config) -> None:
        known = names(whole["instance_group"])
        shared = {str(group["name"]) for group in whole["instance_group"] if group.get("count", 1) > 1}
        for stub in dead:
            if stub.group in living & shared:
                self._say(
                    f"{model}: instance {stub.instance} died and cannot be replaced, for others of its instance group "
                    "live. Its share of the requests fails until the model is unloaded and loaded. Give each instance "
                    "a group of its own, as `nereid add` does"
                )
            elif stub.group not in known:
                self._say(f"{model}: instance {stub.instance} (pid {stub.pid}), of a set that was replaced, died")
            else:
                took = "has taken" if stub.group in living else "takes"
                self._say(f"{model}: instance {stub.instance} (pid {stub.pid}) died; another {took} its place")

    def _take_out(self, model: str, loss: _Loss, config: Config, living: set[str]) -> list[Config]:
        """Let the server send no more requests to groups that are dead, unless all are. The groups that it has then."""
        groups: list[Config] = config["instance_group"]
        left = [group for group in groups if group["name"] in living]
        if left and len(left) < len(groups) and self._load(model, loss, config, left):
            return left
        return groups

    def _put_back(self, model: str, loss: _Loss, whole: Config, groups: list[Config]) -> bool:
        """Start what is missing beside `groups`, those that the model has now. Whether all live then."""
        present = {group["name"]: group for group in groups}
        living = self._living(model)
        wanted = []
        for group in whole["instance_group"]:
            now = present.get(group["name"])
            dead = now is not None and group["name"] not in living
            wanted.append(renewed(group, next(self._renewals)) if dead else now or group)
        if self._load(model, loss, whole, wanted) and names(wanted) <= self._watched(model):
            self._say(f"{model}: its instances are complete again")
            return True
        self._put_off(loss)
        if loss.due - time.monotonic() > _LONG_S:
            self._say(
                f"{model}: instances died {loss.deaths} times in a row; others are started in {_BACKOFF_S[-1]:g} s"
            )
        return False

    def _put_off(self, loss: _Loss) -> None:
        """Wait the longer for the next start the more there were."""
        loss.deaths += 1
        loss.last = time.monotonic()
        loss.due = loss.last + _BACKOFF_S[min(loss.deaths, len(_BACKOFF_S)) - 1]

    def _load(self, model: str, loss: _Loss, config: Config, groups: list[Config]) -> bool:
        loss.arranged.append(names(groups))
        loss.loading = time.monotonic()
        try:
            self._repository.load(model, {**config, "instance_group": groups})
        except RepositoryError as error:
            self._fail(model, error)
            return False
        finally:
            loss.loading = None
        return True

    def _fail(self, model: str, error: Exception) -> None:
        if not self._closing.is_set():
            self._say(f"{model}: the server did not replace a dead instance: {error}")


def newest_by_instance(stubs: Iterable[Stub]) -> dict[tuple[str, str], Stub]:
    """Of each model's instance the stub that was started last."""
    ordered = sorted(stubs, key=lambda stub: (stub.born, stub.pid))
    return {(stub.model, stub.instance): stub for stub in ordered}


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
    words = _command(pid).split("\0")
    if len(words) < 9 or not words[0].endswith(_STUB):
        return None
    born = start_time(pid)
    if born is None:
        return None
    control = int(words[7]) if words[7].isdigit() else 0
    return Stub(pid, int(born), Path(words[1]).parts[-3], words[8], words[2], control)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
