"""A plan arrives at other ranks as it left."""

from __future__ import annotations

from array import array

from engine.cache.writes import BlockWrite, StateCopy
from engine.core.plan import Draft, RowStart, StepPlan
from engine.parallel import commands
from engine.parallel.commands import Close, Draw, Idle, Launch
from engine.types import SamplingParams


def test_a_plan_with_everything_in_it() -> None:
    params = SamplingParams(temperature=0.5, seed=2**63 - 1, logit_bias={5: -1.0}, stop_token_ids=(3,), top_k=4)
    start = RowStart(2, [1, 2, 3], 2, params, (7,), ((8, 9), (10,)), 4)
    plan = StepPlan(
        9,
        [2, 0],
        [5, 0],
        [1, 3],
        [True, False],
        [start],
        [BlockWrite(0, 2, 1, [4, 5])],
        [StateCopy(1, 2)],
        {0: Draft(2, 6, [11, 12])},
        [1],
    )
    assert commands.decode(commands.encode(Launch(plan))) == Launch(plan)


def test_token_ids_of_any_kind() -> None:
    given = RowStart(0, array("i", [1, 2]), 2, SamplingParams())
    heard = commands.decode(commands.encode(Launch(StepPlan(0, [0], [0], [2], [True], [given]))))
    assert isinstance(heard, Launch)
    assert list(heard.plan.starts[0].token_ids) == [1, 2]


def test_the_others() -> None:
    for command in (Draw(3, 16, bytes(64)), Idle(), Close()):
        assert commands.decode(commands.encode(command)) == command
