"""A runner without a model: the next token is a hash of exactly what a model would have read.

Keys and values are stood in for by the token ids themselves, kept in the blocks that the plan's tables name; recurrent
state by a running hash in the state slots. A wrong block, a stale prefix, a block handed out too early or a state that
was not carried changes the tokens, or is caught as a read of a slot that nobody wrote.

Drafts are computed, drawn behind and accepted as a model's are: the rows' true lengths are kept here, and a plan that
counted on more than stood is moved back to them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.cache.spec import Group, LatentKV, LayerSpec, PagedKV, PoolSpec, Recurrent, window_of
from engine.core.plan import NO_SHAPES, Draft, MixedShapes, Pending, RowStart, RunnerInfo, StepPlan, StepResult
from engine.types import TokenLogprobs

EOS = 1


def pool(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    window: int | None = None,
    window_blocks: int = 64,
    full: bool = True,
    state_slots: int = 0,
) -> PoolSpec:
    """A pool with a full group, and on demand a windowed (latent) group and a recurrent one."""
    specs: list[tuple[LayerSpec, int]] = []
    if state_slots:
        specs.append((Recurrent(((2, 2),), (4,)), 0))
    if full:
        specs.append((PagedKV(1, 8, 8, 2), num_blocks))
    if window is not None:
        specs.append((LatentKV(8, 4, 2, window=window), window_blocks))
    groups = tuple(Group(spec, (i,)) for i, (spec, _) in enumerate(specs))
    return PoolSpec(groups, tuple(count for _, count in specs), block_size, state_slots)


def draw(parts: object, vocab_size: int) -> int:
    """A token in [EOS, vocab_size): end of sequence comes up now and then."""
    return EOS + zlib.crc32(repr(parts).encode()) % (vocab_size - EOS)


def roll(state: int, token: int) -> int:
    return zlib.crc32(f"{state},{token}".encode())


def expected_next(tokens: Sequence[int], spec: PoolSpec, vocab_size: int) -> int:
    """What a correct engine draws after `tokens`, from the tokens alone."""
    parts: list[object] = []
    for group in spec.groups:
        if isinstance(group.spec, Recurrent):
            state = 0
            for token in tokens:
                state = roll(state, token)
            parts.append(state)
        else:
            window = window_of(group.spec)
            parts.append(list(tokens[-window:] if window else tokens))
    return draw(parts, vocab_size)


@dataclass(frozen=True)
class _State:
    """The state at `position` and the inputs since: those of a drafted step, of which some may not have stood."""

    position: int
    state: int
    since: tuple[int, ...] = ()

    def at(self, position: int) -> int:
        assert 0 <= position - self.position <= len(self.since), "the state was carried past where the row stands"
        state = self.state
        for token in self.since[: position - self.position]:
            state = roll(state, token)
        return state


@dataclass
class _Row:
    """tokens by position; below `length` they are the row's, above it what drafts left behind. refused: how many tokens
    of the last step did not stand."""

    tokens: dict[int, int]
    length: int
    num_prompt: int
    state_slot: int
    prompt_logprobs: bool
    logprobs: bool
    tables: list[dict[int, int]] = field(default_factory=list)
    refused: int = 0


class _Step:
    def __init__(self, runner: ScriptedRunner, plan: StepPlan, end: float) -> None:
        self._runner = runner
        self.plan = plan
        self.end = end
        self.result: StepResult | None = None

    @property
    def done(self) -> bool:
        return self._runner.now >= self.end

    def wait(self) -> StepResult:
        self._runner.now = max(self._runner.now, self.end)
        self._runner.execute_until(self)
        assert self.result is not None
        return self.result


class ScriptedRunner:
    """Runs plans in launch order, as late as it may: at the wait for the step or for a later one.

    fail_row(tokens) names an error for a row that holds these tokens; fail_step is raised by the launch of that step.
    A step takes step_s of virtual time, the last until free_at; `now` is moved by the wait for one.
    """

    def __init__(
        self,
        spec: PoolSpec,
        *,
        vocab_size: int = 50,
        max_model_len: int = 10_000,
        fail_row: Callable[[list[int]], str | None] = lambda tokens: None,
        fail_step: int | None = None,
        step_s: float = 0.0,
        mixed: MixedShapes = NO_SHAPES,
    ) -> None:
        self.num_late_compiles = 0
        self.now = 0.0
        self.step_s, self.free_at = step_s, 0.0
        self._info = RunnerInfo(spec, vocab_size, max_model_len, (EOS,), mixed=mixed)
        self.plans: list[StepPlan] = []
        self.closed = False
        self._fail_row = fail_row
        self._fail_step = fail_step
        self._queue: list[_Step] = []
        self._rows: dict[int, _Row] = {}
        self._cache: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in spec.groups]
        self._states: dict[int, _State] = {}

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def drafts_ready(self, singles: int, entries: int, depth: int) -> bool:
        return True

    def idle(self) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Pending:
        if plan.step == self._fail_step:
            raise RuntimeError("the device is gone")
        assert plan.step == len(self.plans) + 1
        self.plans.append(plan)
        self.free_at = max(self.free_at, self.now) + self.step_s
        step = _Step(self, plan, self.free_at)
        self._queue.append(step)
        return step

    def close(self) -> None:
        self.closed = True

    def execute_until(self, last: _Step) -> None:
        while last.result is None:
            step = self._queue.pop(0)
            step.result = self._execute(step.plan)

    def _execute(self, plan: StepPlan) -> StepResult:
        for start in plan.starts:
            self._start(start)
        written = [(w.group, w.row, w.index + i) for w in plan.block_writes for i in range(len(w.blocks))]
        assert len(set(written)) == len(written), "a table's entry is written twice in one plan, in no certain order"
        assert len({start.row for start in plan.starts}) == len(plan.starts)
        for write in plan.block_writes:
            row = self._rows[write.row]
            for i, block in enumerate(write.blocks):
                assert block > 0, "the reserved block was handed out"
                row.tables[write.group][write.index + i] = block
        for copy in plan.state_copies:
            self._states[copy.target] = self._states[copy.source]
        assert plan.count == sorted(plan.count, key=lambda count: count > 1), "entries of one token come first"
        assert len(set(plan.rows)) == len(plan.rows)
        result = StepResult(plan.step, [-1] * len(plan.rows))
        firsts = [self._first(plan, entry) for entry in range(len(plan.rows))]
        for entry, (row, first, count) in enumerate(zip(plan.rows, firsts, plan.count, strict=True)):
            self._write(self._rows[row], first, count, entry in plan.drafts)
        for entry, (row, first, count) in enumerate(zip(plan.rows, firsts, plan.count, strict=True)):
            held = self._rows[row]
            if not plan.samples[entry]:
                assert first + count < held.length, "an entry that reaches the end of its tokens must draw one"
                self._read(held, first + count)
            else:
                self._draw(held, entry, plan.drafts.get(entry), result)
            if held.prompt_logprobs:
                upto = min(first + count, held.num_prompt - 1)
                result.prompt_logprobs[entry] = [
                    TokenLogprobs([held.tokens[p + 1]], [-float(p + 1)], [1]) for p in range(first, upto)
                ]
        return result

    def _first(self, plan: StepPlan, entry: int) -> int:
        """Where the entry truly begins; a drafted one takes its drafts."""
        row, first, count = self._rows[plan.rows[entry]], plan.first[entry], plan.count[entry]
        draft = plan.drafts.get(entry)
        if not plan.samples[entry]:
            assert draft is None
            return first
        assert draft is None or count == 1 + draft.count, "an entry with drafts has one token of its own"
        true = row.length - (1 if draft else count)
        assert first - true in (0, row.refused), "the plan counted on tokens that no step can have given"
        if draft is not None:
            assert draft.start <= row.length
            for position in range(row.length, row.length + draft.count):
                row.tokens[position] = draft.tokens[position - draft.start]
        return true

    def _start(self, start: RowStart) -> None:
        self._rows[start.row] = _Row(
            dict(enumerate(start.token_ids)),
            len(start.token_ids),
            start.num_prompt,
            start.state_slot,
            start.params.prompt_logprobs is not None,
            start.params.logprobs is not None,
            [{} for _ in self._info.pool.groups],
        )

    def _write(self, row: _Row, first: int, count: int, drafted: bool) -> None:
        spec = self._info.pool
        for g, group in enumerate(spec.groups):
            if isinstance(group.spec, Recurrent):
                assert row.state_slot > 0
                state = 0 if first == 0 else self._states[row.state_slot].at(first)
                found = _State(first, state, tuple(row.tokens[p] for p in range(first, first + count)))
                self._states[row.state_slot] = found if drafted else _State(first + count, found.at(first + count))
                continue
            for p in range(first, first + count):
                block = row.tables[g][p // spec.block_size]
                self._cache[g][block, p % spec.block_size] = (p, row.tokens[p])

    def _read(self, row: _Row, length: int) -> list[object]:
        """What a model reads that has computed `length` tokens of the row."""
        spec = self._info.pool
        parts: list[object] = []
        for g, group in enumerate(spec.groups):
            if isinstance(group.spec, Recurrent):
                parts.append(self._states[row.state_slot].at(length))
                continue
            window = window_of(group.spec)
            read = []
            for p in range(max(0, length - window) if window else 0, length):
                block = row.tables[g][p // spec.block_size]
                position, token = self._cache[g][block, p % spec.block_size]
                assert position == p, f"position {p} is read from a slot that holds position {position}"
                read.append(token)
            parts.append(read)
        return parts

    def _draw(self, row: _Row, entry: int, draft: Draft | None, result: StepResult) -> None:
        """A token behind the row's last, and one behind each draft that equals the token drawn in its place."""
        run: list[int] = []
        most = 1 + (draft.count if draft else 0)
        while len(run) < most:
            length = row.length
            parts = self._read(row, length)
            error = self._fail_row([row.tokens[p] for p in range(length)])
            if error is not None:
                if not run:
                    result.errors[entry] = error
                    row.tokens[length] = 0  # like a real one, it does not stop the next step, which is on its way
                    row.length += 1
                break
            token = draw(parts, self._info.vocab_size)
            equal = row.tokens.get(length) == token
            row.tokens[length] = token
            row.length += 1
            run.append(token)
            if not equal:
                break
        row.refused = most - max(1, len(run))
        if run:
            result.tokens[entry] = run[0]
        if run[1:]:
            result.accepted[entry] = run[1:]
        if row.logprobs and run:
            result.logprobs[entry] = [TokenLogprobs([token], [-0.5], [1]) for token in run]
