"""Parts of a vocabulary draw the tokens that all of it draws."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kernels.registry import Op
from kernels.sample.reference import gumbel, gumbel_of
from kernels.sample_candidates.reference import MAX_TOP_K
from kernels.testing import bound


def settings(draw: random.Random, device: torch.device, seqs: int) -> dict[str, Any]:
    """Of sequences with any filters that go with candidates."""
    floats = {"dtype": torch.float32, "device": device}
    filters = [draw.random() < 0.7 for _ in range(seqs)]
    top_k = [draw.choice((1, 2, 5, 40, MAX_TOP_K)) if some else 0 for some in filters]
    return {
        "temperature": torch.tensor([draw.choice((0.0, 0.4, 1.0, 2.5)) for _ in filters], **floats),
        "top_k": torch.tensor(top_k, dtype=torch.int32, device=device),
        "top_p": torch.tensor([draw.choice((1.0, draw.random())) if some else 1.0 for some in filters], **floats),
        "min_p": torch.tensor([draw.choice((0.0, draw.random() / 4)) if some else 0.0 for some in filters], **floats),
        "seeds": torch.tensor([draw.randrange(-(2**62), 2**62) for _ in filters], device=device),
        "positions": torch.tensor([draw.randrange(2**20) for _ in filters], dtype=torch.int32, device=device),
        "rows": torch.randperm(seqs, generator=torch.Generator().manual_seed(1)).int().to(device),
    }


def logits_of(kind: str, seqs: int, vocab: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    x = torch.randn(seqs, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        x = x.round()
        x[0] = 1.0
    if kind == "bans":
        x[torch.rand(seqs, vocab, generator=torch.Generator().manual_seed(seed + 1)) < 0.97] = float("-inf")
        x[0], x[1, : vocab // 2], x[2, vocab // 2 :] = float("-inf"), float("-inf"), float("-inf")
    if kind == "broken":
        x[0, vocab - 1], x[1, 0], x[2, vocab // 2] = float("nan"), float("inf"), float("-inf")
    return x.to(dtype)


def merged(candidates: Any, merge: Any, logits: torch.Tensor, sizes: list[int], given: dict[str, Any]) -> torch.Tensor:
    own = {name: given[name] for name in ("rows", "temperature", "top_k", "seeds", "positions")}
    words, first, vocab = [], 0, logits.shape[1]
    for size in sizes:
        part = logits[:, first : first + size]
        words.append(candidates(part, first=first, vocab=vocab, **own))
        first += size
    assert first == vocab
    tokens: torch.Tensor = merge(torch.stack(words), vocab=vocab, **given)
    return tokens


@pytest.mark.parametrize("kind", ["plain", "ties", "bans", "broken"])
@pytest.mark.parametrize("sizes", [[50, 51], [1, 64, 36], [2500, 2500, 2499], [4096, 5000]], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_parts_draw_what_the_whole_draws(kind: str, sizes: list[int], seed: int) -> None:
    given = settings(random.Random(seed), torch.device("cpu"), 24)
    logits = logits_of(kind, 24, sum(sizes), torch.bfloat16 if seed else torch.float32, seed)
    want = Op("sample").reference(logits, **given)
    got = merged(Op("sample_candidates").reference, Op("sample_merge").reference, logits, sizes, given)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("kind", ["plain", "ties", "bans", "broken"])
def test_kernels_of_parts_draw_what_the_whole_draws(kind: str, device: torch.device) -> None:
    given = settings(random.Random(7), device, 7)
    logits = logits_of(kind, 7, 1500, torch.bfloat16, 7).to(device)
    want = Op("sample").reference(logits, **given)
    sizes = [750, 750] if kind == "ties" else [501, 501, 498]
    got = merged(bound(Op("sample_candidates")), bound(Op("sample_merge")), logits, sizes, given)
    assert got.tolist() == want.tolist()


def test_a_part_that_counts_its_tokens_from_zero_is_caught() -> None:
    given = settings(random.Random(3), torch.device("cpu"), 24)
    logits = logits_of("plain", 24, 1000, torch.float32, 3)
    candidates = Op("sample_candidates").reference
    shifted = lambda *args, first, **more: candidates(*args, first=0, **more)  # noqa: E731
    got = merged(shifted, Op("sample_merge").reference, logits, [500, 500], given)
    assert got.tolist() != Op("sample").reference(logits, **given).tolist()


def test_noise_of_a_part_is_that_of_the_whole() -> None:
    seeds, positions = torch.tensor([3, -(2**40)]), torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    whole = gumbel(seeds, positions, 13000)
    for first, size in ((0, 13000), (5, 900), (1023, 2), (1000, 3200), (4096, 4096), (8191, 4809)):
        assert torch.equal(gumbel(seeds, positions, size, first), whole[:, first : first + size])
    ids = torch.tensor([[0, 12999, 4095], [1024, 4096, 8191]])
    assert torch.equal(gumbel_of(seeds, positions, ids), whole.gather(1, ids))
