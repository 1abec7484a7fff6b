"""Steps on N ranks by a model: what was measured on two comes out as it was, and what grows with N does."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.core.plan import MixedShapes
from kernels.sample_candidates.reference import WORDS
from perf.simulate import ranks as model
from perf.simulate import schedule
from perf.simulate.ranks import CANDIDATE_BYTES, SUMS, Ranks, Shape, shared_out
from perf.simulate.step_costs import Cost

LLAMA = Shape(32, 4096, 128256)
MEASURED = {"nccl": {8: 10.8, 512: 14.5, 16 << 10: 84.7}, "one-shot": {8: 6.3, 2048: 18.7}, "two-shot": {128: 7.1}}


@pytest.mark.parametrize("name", sorted(SUMS))
def test_two_ranks_take_what_was_measured(name: str) -> None:
    for size, us in MEASURED[name].items():
        assert SUMS[name].us(size << 10, 2) == pytest.approx(us)
    assert SUMS[name].us(1, 2) == pytest.approx(SUMS[name].measured[0][1])
    assert SUMS[name].us(1 << 30, 1) == 0.0


@pytest.mark.parametrize("name", sorted(SUMS))
def test_a_sum_takes_no_less_for_more_bytes_or_ranks(name: str) -> None:
    sizes = [1 << power for power in range(10, 28)]
    times = [[SUMS[name].us(size, ranks) for size in sizes] for ranks in (2, 4, 8)]
    assert all(of == sorted(of) for of in times)
    assert all(few <= many for two, four in itertools.pairwise(times) for few, many in zip(two, four, strict=True))


def test_bytes_grow_by_what_the_algorithm_sends() -> None:
    size = 256 << 20
    for name, grown in (("nccl", 1.75), ("two-shot", 1.75), ("one-shot", 7.0)):
        assert SUMS[name].us(size, 8) / SUMS[name].us(size, 2) == pytest.approx(grown, rel=0.02)


def test_a_step_is_shared_out_but_for_what_is_whole() -> None:
    alone = Ranks(LLAMA, 1)
    assert alone.step_ms(4.0, 64, 64) == pytest.approx(4.0)
    two = Ranks(LLAMA, 2, whole_ms=0.5)
    assert two.step_ms(4.0, 1, 1) == pytest.approx(0.5 + 1.75 + two.communication_ms(1, 1))
    # 65 sums of a token, and half a sum of what it may draw, or of its logits
    assert two.communication_ms(1, 1) == pytest.approx((65 * 10.8 + SUMS["nccl"].us(2 * CANDIDATE_BYTES, 2) / 2) / 1e3)
    whole = Ranks(LLAMA, 2, whole_logits=True)
    assert whole.communication_ms(1, 1) == pytest.approx((65 * 10.8 + SUMS["nccl"].us(128256 * 2, 2) / 2) / 1e3)
    assert CANDIDATE_BYTES == 4 * WORDS
    assert Ranks(LLAMA, 2, whole_ms=9.0).step_ms(4.0, 1, 0) >= 4.0


def test_each_size_takes_the_fastest_sum() -> None:
    for tokens in (1, 64, 4096):
        each = [Ranks(LLAMA, 4, (name,)).communication_ms(tokens, 0) for name in SUMS]
        assert Ranks(LLAMA, 4, tuple(SUMS)).communication_ms(tokens, 0) == pytest.approx(min(each))


def test_padded_tokens_cross_ranks_too() -> None:
    shapes = MixedShapes(rows=(8,), tokens=(2048,), chunks=1)
    (plain,) = shared_out([Cost(8, 9, 100, 1, 5.0, 0.2)], Ranks(LLAMA, 2))
    (padded,) = shared_out([Cost(8, 9, 100, 1, 5.0, 0.2)], Ranks(LLAMA, 2), shapes)
    assert padded.step_ms > plain.step_ms
    assert padded.launch_ms == 0.2


@pytest.mark.parametrize("text", ["32:4096", "32:4096:x", "0:1:1", ""])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write LAYERS:HIDDEN:VOCABULARY"):
        Shape.parse(text)


@pytest.fixture
def costs(tmp_path: Path) -> str:
    kinds = [(0, 512), (8, 0), (8, 512), (8, 0)]
    measured = [asdict(Cost(rows, 9, prompt, 1, 2.0 + prompt / 100, 0.1)) for rows, prompt in kinds]
    file = tmp_path / "costs.jsonl"
    file.write_text("".join(json.dumps({**cost, "model": "m"}) + "\n" for cost in measured))
    return str(file)


def test_the_table_says_that_it_is_a_model(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    model.main([costs, "32:4096:128256", "--rows", "8", "--ranks", "2", "8"])
    printed = capsys.readouterr().out.splitlines()
    assert "a model, not a measurement" in printed[0].lower()
    assert printed[2].split("|")[1:-1] == [" rows ", " prompt tokens ", " one GPU ", " 2 ranks ", " 8 ranks "]
    assert len(printed) == 6


def test_loads_are_played_on_ranks(costs: str, capsys: pytest.CaptureFixture[str]) -> None:
    def rate(*more: str) -> float:
        schedule.main([costs, "c=2:n=4:in=64:out=4", *more])
        printed = capsys.readouterr().out
        assert ("a model, not a measurement" in printed) == bool(more)
        return float(printed.split(" tok/s")[0].split()[-1])

    shape = ["--shape", "2:64:1000"]
    assert rate() < rate("--ranks", "2", *shape)
    assert rate("--ranks", "2", *shape) > rate("--ranks", "2", "--shape", "200:64:1000")
    with pytest.raises(SystemExit):
        schedule.main([costs, "c=2:n=4:in=64:out=4", "--ranks", "2"])
