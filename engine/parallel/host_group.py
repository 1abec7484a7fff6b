"""The other hosts of a model, as the first sees them: takes them in, sends them steps, notices when one is gone."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from engine.config import EngineConfig
from engine.parallel import identity
from engine.parallel.host_link import (
    BEAT_S,
    MEET_S,
    Beat,
    Fault,
    Goodbye,
    Hello,
    Joined,
    Link,
    LinkError,
    Refused,
    Said,
    Welcome,
    sentence_of,
)
from engine.parallel.placement import Placement, PlacementError

log = logging.getLogger(__name__)

MAX_STRANGERS = 16
_LOOK_MS = 100
_HELLO_S = 10.0
_BACKLOG = 64
# Meant so.
LOOPBACKS = ("localhost", "127.", "::1")
# Names of pods come up with them; a port stays taken for a moment by an engine that has just ended.
LISTEN_S = 20.0
_AGAIN_S = 0.5
_DEAF_S = 0.5  # without descriptors no connection can be taken
_LAST_S = 1.0  # for a last word to a host that is busy


def listen(placement: Placement, port: int | None = None, patience_s: float = LISTEN_S) -> socket.socket:
    """A socket at the address of the first host, which must be this one's. port: another than the placement's.

    patience_s: how long an unknown name, or a port that is taken, is tried again. Raises PlacementError.
    """
    deadline = time.monotonic() + patience_s
    port = placement.port if port is None else port
    while True:
        try:
            return _bound(placement.address, port)
        except OSError as error:
            fleeting = isinstance(error, socket.gaierror) or error.errno == errno.EADDRINUSE
            if not fleeting or time.monotonic() > deadline:
                raise PlacementError(_why_deaf(placement.address, port, error)) from None
        time.sleep(_AGAIN_S)


def _bound(address: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    if ipaddress.ip_address(where[0]).is_loopback and not address.startswith(LOOPBACKS):
        raise PlacementError(
            f"MASTER_ADDR {address} is {where[0]} on this host, as its own name often is in /etc/hosts, and the others "
            "cannot reach that: set MASTER_ADDR to its address in the network"
        )
    return socket.create_server(where[:2], family=family, backlog=_BACKLOG)


def _why_deaf(address: str, port: int, error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return (
            f"MASTER_ADDR {address} is no name that this host knows ({error.strerror}): set it to this host's address"
        )
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {address} is taken: set MASTER_PORT to a free one on every host. A server serves one "
            "model over several hosts"
        )
    return (
        f"the first host cannot listen at MASTER_ADDR {address}, port {port} ({os.strerror(error.errno or 0)}): it "
        "must be an address of the host with RANK 0, and the port one that may be taken"
    )


class _Guest:
    """A connection, and how far its host has come."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.since = time.monotonic()
        self.host: int | None = None
        self.joined = False


class Hosts:
    """All hosts of `placement` but this, the first. failed: called with a sentence that names the host, when one that
    has joined is gone or hangs, or when one does not come; and whether that would happen again."""

    def __init__(
        self,
        config: EngineConfig,
        placement: Placement,
        store: int,
        failed: Callable[[str, bool], None],
        meet_s: float = MEET_S,
    ) -> None:
        """store: the port where ranks meet. Raises PlacementError, and OSError where the model cannot be read."""
        self._config = config
        self._placement = placement
        self._failed = failed
        self._meet_s = meet_s
        self._timeout_s = config.parallel.hang_timeout_s
        self._code, self._packages = identity.code(), identity.packages()
        self._welcome = Welcome(config, identity.model(config), store)
        self._listener = listen(placement)
        self._listener.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._listener, select.POLLIN)
        self._guests: dict[int, _Guest] = {}  # by file descriptor
        self._links: tuple[Link, ...] = ()  # of the hosts that have joined
        self._turned_away = ""
        self._deaf_until: float | None = None
        self._ending: Said | None = None
        self._thread = threading.Thread(target=self._run, name="nereid-hosts", daemon=True)
        self._thread.start()

    def send(self, step: bytes) -> None:
        """For one thread. A host that takes nothing is waited for until it is given up."""
        for link in self._links:
            link.send_step(step)

    def close(self) -> None:
        """Let all hosts end for good."""
        self._end(Goodbye())

    def give_up(self, why: str, lasting: bool) -> None:
        """Tell all hosts why the group ends, and whether it would again. For any thread, also again."""
        self._end(Fault(sentence_of(why), lasting))

    def _end(self, why: Said) -> None:
        self._ending = self._ending or why
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            log.exception("other hosts are not watched any more")
            self._fail(f"other hosts are not watched any more: {error}")
        self._listener.close()
        for guest in self._guests.values():
            if guest.host is not None and self._ending is not None:
                guest.link.mention(self._ending, _LAST_S)
            guest.link.close()

    def _watch(self) -> None:
        """Until the group ends."""
        deadline, beaten = time.monotonic() + self._meet_s, 0.0
        log.info(
            "waiting at %s, port %d, for the other hosts of %d",
            self._placement.address,
            self._placement.port,
            self._placement.hosts,
        )
        while self._ending is None:
            for descriptor, _ in self._poller.poll(_LOOK_MS):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._guests:
                    self._hear(self._guests[descriptor])
            if self._deaf_until is not None and time.monotonic() > self._deaf_until:
                self._deaf_until = None
                self._poller.register(self._listener, select.POLLIN)
            for guest in list(self._guests.values()):
                self._look(guest)
            if time.monotonic() > deadline and len(self._links) < self._placement.hosts - 1:
                self._fail(self._missing())
            if time.monotonic() - beaten > BEAT_S:
                beaten = time.monotonic()
                for link in self._links:
                    link.mention(Beat())

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it is gone already
            return
        except OSError as error:  # as when descriptors run out: it stays where it is, and would be polled for ever
            log.warning("no other host can be taken in at the moment (%s)", error.strerror)
            self._poller.unregister(self._listener)
            self._deaf_until = time.monotonic() + _DEAF_S
            return
        strangers = [guest for guest in self._guests.values() if guest.host is None]
        if len(strangers) >= MAX_STRANGERS:
            self._part(strangers[0])
        try:
            guest = _Guest(Link(connected))
        except OSError:  # it is gone already
            connected.close()
            return
        self._guests[guest.link.fileno()] = guest
        self._poller.register(guest.link.fileno(), select.POLLIN)

    def _hear(self, guest: _Guest) -> None:
        try:
            for said in guest.link.receive():
                self._take(guest, said)
        except LinkError as error:
            if guest.joined:
                self._fail(f"{self._name(guest)}: {error}")
                return
            log.warning("%s: the connection is closed. This port is for the hosts of the model alone", error)
            self._part(guest)

    def _take(self, guest: _Guest, said: Said | bytes) -> None:
        if isinstance(said, Hello) and guest.host is None:
            self._meet(guest, said)
        elif isinstance(said, Joined) and guest.host is not None and not guest.joined:
            guest.joined = True
            self._links = (*self._links, guest.link)
            log.info("%s has joined", self._name(guest))
        elif isinstance(said, Fault) and guest.joined:
            self._fail(f"{self._name(guest)}: {sentence_of(said.sentence)}", said.lasting)
        elif isinstance(said, Fault) and guest.host is not None:
            self._turn_away(guest, sentence_of(said.sentence))
        elif not isinstance(said, Beat):
            raise LinkError(f"{guest.link.peer} says {type(said).__name__}, which is not its turn")

    def _meet(self, guest: _Guest, hello: Hello) -> None:
        """Take a host in, or say why not."""
        lasting, why = True, None
        if hello.hosts != self._placement.hosts:
            why = f"its WORLD_SIZE is {hello.hosts}, and here it is {self._placement.hosts}: set the same on every host"
        elif not 0 < hello.host < hello.hosts:
            why = f"its RANK is {hello.host}: others than the first are 1 to {self._placement.hosts - 1}"
        elif hello.packages != self._packages:
            theirs, ours = _versions(hello.packages, self._packages), _versions(self._packages, hello.packages)
            why = f"it has {theirs} and the first host {ours}: install the same on every host"
        elif hello.code != self._code:
            why = "its files of Nereid differ from those of the first host: install the same version on every host"
        elif any(other.host == hello.host for other in self._guests.values()):
            lasting, why = False, "a host of that RANK is here already: give each process a RANK of its own"
        if why is not None:
            guest.link.say(Refused(why, lasting))
            self._turn_away(guest, f"host {str(hello.host)[:20]} ({guest.link.peer}) is refused: {why}")
            return
        guest.host, guest.since = hello.host, time.monotonic()
        guest.link.say(self._welcome)

    def _turn_away(self, guest: _Guest, sentence: str) -> None:
        if sentence != self._turned_away:
            log.warning("%s", sentence)
        self._turned_away = sentence
        self._part(guest)

    def _look(self, guest: _Guest) -> None:
        """Notice what has become of a connection."""
        link, now = guest.link, time.monotonic()
        if not guest.joined:
            patience = _HELLO_S if guest.host is None else self._meet_s
            hangs = guest.host is not None and now - link.heard > self._timeout_s
            if hangs:
                log.warning("%s has not joined and said nothing for %.0f s", self._name(guest), now - link.heard)
            if link.ended or hangs or now - guest.since > patience:
                self._part(guest)
        elif link.ended:
            self._fail(f"{self._name(guest)} has closed its connection: its process has ended, or the network has")
        elif now - link.heard > self._timeout_s:
            self._fail(f"{self._name(guest)} has said nothing for {now - link.heard:.0f} s")

    def _part(self, guest: _Guest) -> None:
        descriptor = guest.link.fileno()
        if self._guests.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)
            with contextlib.suppress(OSError):
                guest.link.close()

    def _name(self, guest: _Guest) -> str:
        return f"host {guest.host} ({guest.link.peer})"

    def _missing(self) -> str:
        here = {guest.host for guest in self._guests.values() if guest.joined}
        missing = [str(host) for host in range(1, self._placement.hosts) if host not in here]
        where = f"MASTER_ADDR={self._placement.address} and port {self._placement.port}"
        said = f" (the last that came: {self._turned_away})" if self._turned_away else ""
        return (
            f"host {', '.join(missing)} of {self._placement.hosts} has not come within {self._meet_s:.0f} s{said}: "
            f"start `nereid rank` there, with {where}"
        )

    def _fail(self, sentence: str, lasting: bool = False) -> None:
        self._ending = self._ending or Fault(sentence_of(sentence), lasting)
        self._failed(sentence, lasting)


def _versions(of: dict[str, str], other: dict[str, str]) -> str:
    """What differs, by name, as one says it."""
    found = [f"{name} {of.get(name) or 'none'}" for name in sorted({*of, *other}) if of.get(name) != other.get(name)]
    return ", ".join(found)[:200]
