"""Drafts by suffixes: what most often followed, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.suffix import DEEPEST, MAX_WAITING, MIN_LIKELY, TAKEN, Outputs, SuffixDrafter, SuffixTree

texts = st.lists(st.lists(st.integers(0, 2), max_size=DEEPEST // 2), max_size=6)
ends = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def tree_of(*given_texts: list[int]) -> SuffixTree:
    tree = SuffixTree()
    for text in given_texts:
        tree.append(text)
    tree.take_in(1 << 20)
    return tree


def following(tree: SuffixTree, tokens: list[int], count: int = 4) -> tuple[int, list[int]]:
    return tree.following(array("i", tokens), count)


def stood(known: list[list[int]], run: list[int]) -> list[tuple[int, int]]:
    """Text and end of each place where a run stood."""
    return [
        (i, start + len(run))
        for i, text in enumerate(known)
        for start in range(len(text) - len(run) + 1)
        if text[start : start + len(run)] == run
    ]


def likeliest(known: list[list[int]], tokens: list[int], count: int) -> tuple[int, list[int]]:
    """By definition: behind the longest run of the last tokens, the token that followed most often, the later of
    equals, as long as all of them together are likely; where one place is left, what stands there."""
    for size in range(len(tokens), 0, -1):
        run, likely = tokens[len(tokens) - size :], 1.0
        while len(run) < size + count:
            places = stood(known, run)
            nexts = [known[i][end] for i, end in places if end < len(known[i])]
            if not nexts:
                break
            best = max(set(nexts), key=lambda token: (nexts.count(token), len(nexts) - nexts[::-1].index(token)))
            likely *= nexts.count(best) / len(places)
            if len(places) > 1 and likely < MIN_LIKELY:
                break
            run = [*run, best]
        if len(run) > size:
            return size, run[size:]
    return 0, []


@given(texts, ends, st.integers(1, 9))
def test_proposals_are_what_the_definition_says(known: list[list[int]], tokens: list[int], count: int) -> None:
    assert following(tree_of(*known), tokens, count) == likeliest(known, tokens, count)


@given(texts, ends, st.lists(st.integers(1, 9), max_size=40))
def test_texts_taken_in_bit_by_bit_are_known_like_those_taken_in_at_once(
    known: list[list[int]], tokens: list[int], sizes: list[int]
) -> None:
    tree = SuffixTree()
    for i, text in enumerate(known):
        tree.append(text)
        tree.take_in(sizes[i] if i < len(sizes) else 0)
    tree.take_in(1 << 20)
    assert following(tree, tokens) == following(tree_of(*known), tokens)


def test_what_followed_most_often_is_proposed() -> None:
    known = tree_of([1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [7, 2, 3, 4, 6])
    assert following(known, [1, 2, 3], 1) == (3, [9]), "as often as 4, and later"
    assert following(known, [2, 3], 2) == (2, [4, 6])
    assert following(known, [8, 2, 3], 1) == (2, [4])
    assert following(known, [8]) == (0, [])


def test_a_longer_run_than_is_kept_goes_on_as_it_last_did() -> None:
    same = list(range(100, 100 + DEEPEST + 5))
    known = tree_of([*same, 1, 2], [*same, 3, 4])
    assert following(known, same, 2) == (DEEPEST - 1, [3, 4])


def test_a_run_that_became_unlikely_ends() -> None:
    known = tree_of(*[[1, 2, 10 + i, 30 + i] for i in range(20)])
    assert following(known, [1], 4) == (1, [2])


def test_memory_is_bounded_whatever_is_said() -> None:
    draw = random.Random(0)
    outputs = Outputs(most_nodes=5000, most_tokens=8000)
    drafter = SuffixDrafter(outputs)
    fresh, same = [], [7] * 300
    for _ in range(60):
        fresh = [draw.randrange(1000) for _ in range(300)]
        for text in (fresh, same):
            drafter.close(text)
            outputs.take_in(1 << 20)
    assert outputs.nodes <= 2 * (5000 + DEEPEST + 1)
    assert len(outputs._latest) + len(outputs._before) <= 2 * (8000 + 700)
    assert outputs.following(array("i", fresh[:9]), 3, 0) == fresh[9:12], "the latest are known"


def test_a_tree_does_not_grow_while_it_takes_in() -> None:
    draw = random.Random(0)
    tree = SuffixTree(max_nodes=2000)
    tree.append([draw.randrange(100) for _ in range(4000)])
    tracemalloc.start()
    try:
        tree.take_in(4000)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert tree.full
    assert tree.num_waiting > 0, "what no longer fits waits for the next tree"
    assert grown < 2000


def test_a_cleared_tree_is_as_a_new_one() -> None:
    draw = random.Random(0)
    old, new = (SuffixTree(max_nodes=2000, max_tokens=4000) for _ in range(2))
    old.append([draw.randrange(5) for _ in range(3000)])
    old.take_in(3000)
    old.clear()
    text = [draw.randrange(5) for _ in range(1000)]
    for tree in (old, new):
        tree.append(text)
        tree.take_in(1000)
    assert old.nodes == new.nodes
    for start in range(900):
        asked = text[start : start + 20]
        assert old.following(asked, 8) == new.following(asked, 8)


def test_outputs_do_not_grow_when_a_tree_takes_the_others_place() -> None:
    draw = random.Random(0)
    texts = [[draw.randrange(100) for _ in range(90)] for _ in range(400)]
    outputs = Outputs(most_nodes=2000, most_tokens=4000)
    trees = {id(outputs._latest), id(outputs._before)}
    tracemalloc.start()
    try:
        for text in texts:
            outputs.add(text)
            outputs.take_in(1 << 20)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert outputs.nodes > 2000
    assert {id(outputs._latest), id(outputs._before)} == trees
    assert grown < 4000


def test_what_comes_faster_than_it_is_taken_in_is_left_out() -> None:
    outputs = Outputs()
    for _ in range(100):
        outputs.add([1] * 1000)
    assert outputs._latest.num_waiting <= MAX_WAITING + 100


def test_texts_of_other_requests_and_its_own_are_proposed() -> None:
    outputs = Outputs()
    first, second = SuffixDrafter(outputs), SuffixDrafter(outputs)
    said = list(range(40, 60))
    asked = array("i", [1, 2, *said[:5]])
    assert not first.propose(asked, 4)
    first.close(said)
    for _ in range(len(said) // TAKEN + 1):
        outputs.take_in(TAKEN)
    assert list(second.propose(asked, 4)) == said[5:9]
    own = array("i", [1, 2, 3, 9, 9, 2, 3])
    assert list(SuffixDrafter(outputs).propose(own, 2)) == [9, 9]
