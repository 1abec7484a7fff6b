"""The processes of a model that is shared by several ranks: started together, watched, and ended together.

The engine's process is the first rank. It starts the others of its host, which do what it tells them through a ring in
shared memory; other hosts come by themselves and are told over TCP. A rank that dies, or says nothing for long, is
named, and its group ends.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from engine.config import EngineConfig
from engine.env import Launched
from engine.parallel.host_group import Hosts, listen
from engine.parallel.leader import LeadingRunner
from engine.parallel.local_ranks import LocalRanks
from engine.parallel.placement import ALONE, Placement, PlacementError, placed
from engine.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from engine.runner.build import Progress
    from kernels.compilation.ahead import Elsewhere

T = TypeVar("T")

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_BLAME_S = 1.0


class RankError(RuntimeError):
    """A rank is gone or hangs; the message names it."""


class Group:
    """The other ranks of an engine with `config.parallel.tensor` of them, on the hosts of `placement`."""

    def __init__(self, config: EngineConfig, placement: Placement = ALONE) -> None:
        """Raises OSError when there is no process to be had, PlacementError when hosts cannot meet here."""
        if placement.host != 0:
            raise PlacementError(
                f"RANK is {placement.host}, and the engine runs with RANK 0 alone: start `nereid rank` on this host"
            )
        self._config = config
        self.size = config.parallel.tensor
        self._failure: RankError | None = None
        self._failed = threading.Event()
        own = placement.ranks(self.size)
        self._listener = listen(placement, 0)
        address, port = self._listener.getsockname()[:2]
        self._rendezvous = Rendezvous(address, port, address, len(own))
        self._local: LocalRanks | None = None
        self._hosts: Hosts | None = None
        if placement.hosts > 1:
            self._hosts = Hosts(config, placement, port, self._fail)
        if len(own) > 1:
            try:
                self._local = LocalRanks(config, own[1:], self._rendezvous, 0, self._fail)
            except OSError as error:
                self._end(f"ranks could not be started ({error.strerror})", False)
                raise

    @classmethod
    def of(cls, config: EngineConfig, launched: Launched | None) -> Group | None:
        """The group of an engine; None where it has one rank. Raises PlacementError as `placed` does, and for a number
        of ranks that does not go into the hosts."""
        placement = placed(launched)
        placement.ranks(config.parallel.tensor)
        return cls(config, placement) if config.parallel.tensor > 1 else None

    def lost(self) -> RankError | None:
        """Why the group cannot go on, or None."""
        return self._failure

    @property
    def pids(self) -> list[int]:
        """Of the ranks of this host behind the first."""
        return [] if self._local is None else self._local.pids

    def lead(self, progress: Progress | None, elsewhere: Elsewhere | None) -> LeadingRunner:
        """The runner of the first rank, which is this process, over all of them. Imports torch.

        Raises RankError when another rank fails first, else what `runner_of` does; the group has ended then.
        """
        from engine.parallel.start import runner_of

        rendezvous, listener = self._rendezvous, self._listener.detach()
        try:
            runner = self._guarded(lambda: runner_of(self._config, 0, rendezvous, listener, progress, elsewhere))
        except BaseException as error:
            self._end(str(error) or type(error).__name__, isinstance(error, ValueError))
            raise
        return LeadingRunner(runner, self._send, self.close, self._blamed)

    def _send(self, message: bytes) -> None:
        # The way to other hosts is the longer one.
        if self._hosts is not None:
            self._hosts.send(message)
        if self._local is not None:
            self._local.send(message)

    def _blamed(self) -> RankError | None:
        """The rank that has failed, where another noticed first: a process is seen to be gone in a moment."""
        self._failed.wait(_BLAME_S)
        return self._failure

    def _guarded(self, work: Callable[[], T]) -> T:
        """What `work` gives. Raises RankError as soon as a rank has failed, whatever `work` waits for."""
        ended: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                ended.put((work(), None))
            except BaseException as error:
                ended.put((None, error))

        threading.Thread(target=run, name="nereid-load-rank", daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                given, error = ended.get(timeout=_LOOK_S)
                if error is None:
                    return given  # type: ignore[return-value]
                raise self._blamed() or error
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Wait for the ranks to end, which were told to; then end them."""
        if self._hosts is not None:
            self._hosts.close()
        if self._local is not None:
            self._local.close()

    def _fail(self, sentence: str, lasting: bool) -> None:
        """Called by whoever watches ranks; the first word counts. lasting: another group would end so too."""
        if self._failure is not None:
            return
        log.error("%s: the group of %d ranks ends", sentence, self.size)
        self._failure = RankError(sentence)
        self._failed.set()
        self._end(sentence, lasting)

    def _end(self, why: str, lasting: bool) -> None:
        if self._hosts is not None:
            self._hosts.give_up(why, lasting)
        if self._local is not None:
            self._local.kill()
