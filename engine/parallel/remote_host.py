"""Another host than the first: takes its place in a model's group, starts the ranks that belong here, passes steps on.

When the group ends it looks for the first host again, which comes back as an engine does that has died.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.parallel import identity
from engine.parallel.host_link import (
    BEAT_S,
    MAX_STEP_BYTES,
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
from engine.parallel.local_ranks import LocalRanks
from engine.parallel.placement import Placement, PlacementError
from engine.parallel.rendezvous import Rendezvous
from engine.parallel.ring import RingClosed

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_CONNECT_S = 5.0
_LAST_S = 2.0  # for a last word to arrive
_ANSWER_S = 60.0  # for the first host to say whether it takes this one


class HostError(RuntimeError):
    """This host cannot take part; the message says why and what to do."""


def serve(placement: Placement, checkpoint: Path | None = None, patience_s: float = MEET_S) -> None:
    """Hold this host's ranks until the engine is told to end.

    checkpoint: the model's folder, where it is another than on the first host. patience_s: how long the first host is
    looked for, each time. Raises PlacementError or HostError.
    """
    if placement.hosts == 1:
        raise PlacementError(
            "WORLD_SIZE is not set, or 1: ranks of other hosts need MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as "
            "torchrun and LeaderWorkerSet set them; on one host `nereid serve` starts all ranks"
        )
    if placement.host == 0:
        raise PlacementError(
            "RANK is 0, which runs the server: start `nereid serve` here and `nereid rank` on the others"
        )
    hello = Hello(placement.host, placement.hosts, identity.code(), identity.packages())
    said = "nobody listened there"
    until = time.monotonic() + patience_s
    while True:
        try:
            link, welcome = _find(placement, hello)
        except (OSError, LinkError) as error:
            said = (error.strerror if isinstance(error, OSError) else None) or str(error) or said
            if time.monotonic() > until:
                raise HostError(_not_found(placement, patience_s, said)) from None
            time.sleep(_AGAIN_S)
            continue
        try:
            if _Member(placement, link, welcome, checkpoint).run():
                log.info("the engine has ended, and with it the ranks of this host")
                return
        finally:
            link.close()
        said = "nobody listened there"
        until = time.monotonic() + patience_s
        log.info("the ranks of this host have ended; looking for the first host again")


def _not_found(placement: Placement, patience_s: float, said: str) -> str:
    return (
        f"the first host is not to be found at MASTER_ADDR {placement.address}, port {placement.port}, for "
        f"{patience_s:.0f} s ({said}): start the server there with RANK=0 and the same WORLD_SIZE and MASTER_PORT, and "
        "a model whose parallel.tensor is a multiple of WORLD_SIZE, and see that this host reaches it"
    )


def _find(placement: Placement, hello: Hello) -> tuple[Link, Welcome]:
    """Raises OSError or LinkError where it may be tried again, HostError where that would not help."""
    link = Link(socket.create_connection((placement.address, placement.port), _CONNECT_S), MAX_STEP_BYTES)
    until = time.monotonic() + _ANSWER_S
    try:
        link.say(hello)
        while time.monotonic() < until and not link.ended:
            if not link.wait(_AGAIN_S):
                continue
            for answer in link.receive():
                if isinstance(answer, Welcome):
                    return link, answer
                if isinstance(answer, Refused) and answer.lasting:
                    raise HostError(f"the first host refuses this one: {answer.sentence}")
                if isinstance(answer, Refused):
                    raise LinkError(answer.sentence)
        raise LinkError("it does not answer as Nereid does; torchrun takes MASTER_PORT for itself, and Nereid the next")
    except BaseException:
        link.close()
        raise


class _Member:
    """This host as one of a group, which ends with it."""

    def __init__(self, placement: Placement, link: Link, welcome: Welcome, checkpoint: Path | None) -> None:
        self._placement = placement
        self._link = link
        config = welcome.config
        self._config = config if checkpoint is None else msgspec.structs.replace(config, model=str(checkpoint))
        self._welcome = welcome
        self._fault: str | None = None
        self._until = float("inf")  # when a fault that was told of need not be heard any more

    def run(self) -> bool:
        """Whether the engine was told to end; else the group has ended and may come again. Raises HostError where it
        will not."""
        beats = threading.Thread(target=self._beat, name="nereid-beat", daemon=True)
        beats.start()
        try:
            self._check(self._config)
            return self._serve()
        finally:
            self._link.close()
            beats.join()

    def _serve(self) -> bool:
        each = self._placement.ranks(self._config.parallel.tensor)
        rendezvous = Rendezvous(self._link.peer, self._welcome.store, self._link.own, len(each))
        taken = self._placement.local * len(each)
        log.info("ranks here: %s, of %d", ", ".join(map(str, each)), self._config.parallel.tensor)
        self._link.say(Joined())
        try:
            ranks = LocalRanks(self._config, each, rendezvous, taken, self._fail)
        except OSError as error:
            self._fail(f"its ranks could not be started ({error.strerror})", False)
            return False
        try:
            ended = self._pass_on(ranks)
            if ended:
                ranks.close()
            return ended
        except (SystemExit, KeyboardInterrupt):
            self._link.mention(Fault("its process was told to end"), _LAST_S)
            raise
        finally:
            ranks.kill()

    def _check(self, config: EngineConfig) -> None:
        """Whether the model is the one that the first host has."""
        try:
            same = identity.model(config) == self._welcome.model
        except OSError as error:
            self._refuse(
                f"{config.model} cannot be read there ({error.strerror}): copy the checkpoint to this host, or "
                "say where it is with --checkpoint"
            )
        else:
            if not same:
                self._refuse(
                    f"the checkpoint in {config.model} is another than on the first host: copy the same to every host"
                )

    def _refuse(self, sentence: str) -> None:
        self._link.say(Fault(f"its model is not that of the first host: {sentence}"))
        raise HostError(sentence)

    def _pass_on(self, ranks: LocalRanks) -> bool:
        """Steps to the ranks, as they come. Whether the engine was told to end."""
        timeout_s = self._config.parallel.hang_timeout_s
        while time.monotonic() < self._until and not self._link.ended:
            silent_s = time.monotonic() - self._link.heard
            if silent_s > timeout_s:
                log.error("the first host has said nothing for %.0f s: the group ends", silent_s)
                return False
            if not self._link.wait(BEAT_S):
                continue
            try:
                if any(self._take(ranks, said) for said in self._link.receive()):
                    return True
            except RingClosed:
                continue  # whoever ended the ranks says why
            except LinkError as error:
                log.error("%s", error)
                return False
        if self._fault is None:
            log.error("the first host has closed its connection: the group ends")
        return False

    def _take(self, ranks: LocalRanks, said: Said | bytes) -> bool:
        if isinstance(said, bytes):
            if self._fault is None:
                ranks.send(said)
        elif isinstance(said, Goodbye):
            return True
        elif isinstance(said, Fault):
            if said.lasting:
                raise HostError(f"the first host cannot serve the model: {sentence_of(said.sentence)}")
            if self._fault is None:
                log.error("%s: the group ends", sentence_of(said.sentence))
            self._fault, self._until = said.sentence, 0.0
        elif not isinstance(said, Beat):
            raise LinkError(f"the first host says {type(said).__name__}, which is not its turn")
        return False

    def _fail(self, sentence: str, lasting: bool) -> None:
        """A rank of this host is gone."""
        log.error("%s: the group ends", sentence)
        self._fault, self._until = sentence, time.monotonic() + _LAST_S
        self._link.mention(Fault(sentence_of(sentence), lasting), _LAST_S)

    def _beat(self) -> None:
        while not self._link.ended:
            self._link.mention(Beat())
            time.sleep(BEAT_S)
