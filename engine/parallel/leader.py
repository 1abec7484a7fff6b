"""The first rank's runner: tells the other ranks each step, and executes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from engine.core.plan import MaskedPending, Pending, Runner, RunnerInfo, StepPlan, StepResult
from engine.parallel import commands
from engine.parallel.commands import Close, Draw, Idle, Launch

if TYPE_CHECKING:
    from engine.core.plan import Masks

Send = Callable[[bytes], None]


class LeadingRunner:
    """A `Runner` over one rank's. A plan leaves before this rank launches it, so the others prepare it meanwhile.

    closed is called behind `close`. blame says which rank a failure here comes from, if one does.
    """

    def __init__(
        self, runner: Runner, send: Send, closed: Callable[[], None], blame: Callable[[], BaseException | None]
    ) -> None:
        self._runner = runner
        self._send = send
        self._closed = closed
        self._blame = blame

    @property
    def info(self) -> RunnerInfo:
        return self._runner.info

    @property
    def num_late_compiles(self) -> int:
        return self._runner.num_late_compiles

    def launch(self, plan: StepPlan) -> Pending:
        self._send(commands.encode(Launch(plan)))
        try:
            pending = self._runner.launch(plan)
        except RuntimeError as error:
            raise self._blame() or error from error
        return _Masked(plan.step, cast(MaskedPending, pending), self._send) if plan.masked else pending

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        return self._runner.drafts_ready(singles, entries, depth)

    def idle(self) -> bool:
        self._send(commands.encode(Idle()))
        return self._runner.idle()

    def close(self) -> None:
        self._send(commands.encode(Close()))
        self._runner.close()
        self._closed()


class _Masked:
    """A masked step of all ranks."""

    def __init__(self, step: int, pending: MaskedPending, send: Send) -> None:
        self._step = step
        self._pending = pending
        self._send = send
        self._masks: Masks | None = None

    @property
    def done(self) -> bool:
        return self._pending.done

    def mask_rows(self, count: int, words: int) -> Masks:
        self._masks = self._pending.mask_rows(count, words)
        return self._masks

    def draw(self) -> None:
        if self._masks is not None:
            self._send(commands.encode(Draw(self._step, self._masks.shape[1], self._masks.tobytes())))
        self._pending.draw()

    def wait(self) -> StepResult:
        return self._pending.wait()
