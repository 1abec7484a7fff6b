"""What a measurement asks for, and how its answers are summed up."""

from __future__ import annotations

import jsonschema
import pytest

from perf.bench import report
from perf.workload import Answer, parse, requests, summary, warm_requests


def test_a_spec_says_what_is_missing_or_unknown() -> None:
    with pytest.raises(ValueError, match="needs c= "):
        parse("n=4:in=8:out=2")
    with pytest.raises(ValueError, match="'x=3'"):
        parse("c=1:x=3")
    assert parse("c=8:in=16-32", seed=7).seed == 7
    assert parse("c=8:seed=3", seed=7).seed == 3
    assert parse("c=8").requests == 32


def test_equal_specs_make_equal_requests_and_other_seeds_others() -> None:
    spec = parse("q=5:n=6:in=10-20:out=3-4:prefix=4:groups=2:seed=1")
    made = requests(spec, 100, 200)
    assert made == requests(spec, 100, 200)
    assert made != requests(parse(spec.text.replace("seed=1", "seed=2")), 100, 200)
    assert all(10 <= len(r.prompt) <= 20 and 3 <= r.output <= 4 for r in made)
    assert made[0].prompt[:4] == made[2].prompt[:4] != made[1].prompt[:4]
    assert [r.at for r in made] == sorted(r.at for r in made)
    assert not {tuple(r.prompt) for r in made} & {tuple(r.prompt) for r in warm_requests(spec, 100, 200)}


def test_requests_are_greedy_unless_a_spec_says_otherwise() -> None:
    plain = requests(parse("c=1:n=2:in=8:out=2"), 100, 200)
    assert [r.sampling for r in plain] == [{"temperature": 0.0}] * 2
    drawn = requests(parse("c=1:n=3:in=8:out=2:seed=5:temperature=0.5:schemas=2"), 100, 200)
    assert [r.sampling["seed"] for r in drawn] == [5, 6, 7]
    first, second, third = (r.sampling["structured_outputs"]["json"] for r in drawn)
    assert first == third != second
    jsonschema.Draft202012Validator.check_schema(first)


def test_texts_take_the_place_of_drawn_prompts() -> None:
    made = requests(parse("c=1:n=3:in=8:out=2"), 100, 200, texts=[[1, 2], [3]])
    assert [r.prompt for r in made] == [[1, 2], [3], [1, 2]]


def test_a_summary_counts_failures_and_measures_the_rest() -> None:
    spec = parse("c=2:n=3")
    good = [Answer(4, 3, 0.0, 1.0, [0.5, 0.7, 0.9], 3), Answer(4, 3, 0.5, 2.5, [1.0, 2.0], 3)]
    figures = summary(spec, [*good, Answer(4, 3, 0.0, 0.0, [], 0, "UNAVAILABLE: the queue is full")])
    assert figures["failed"] == 1
    assert figures["first_error"] == "UNAVAILABLE: the queue is full"
    assert figures["output_tokens_per_s"] == round(6 / 2.5, 2)
    assert figures["ttft_ms"]["p50"] == 500.0
    assert figures["tpot_ms"]["max"] == 500.0
    assert figures["itl_ms"]["max"] == 1000.0
    record = {"row": "2x", **figures}
    assert report.cell("2x", record) == "1 of 3 failed"
    assert report.cell("2x", None) == "not measured"
    assert "tok/s" in report.cell("2x", {**record, "failed": 0})
