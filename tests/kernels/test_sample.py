"""What a table of cases cannot say of sampling: distribution, exact filters, independence of the batch, bad rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.registry import Op
from kernels.sample.reference import gumbel, philox
from kernels.testing import bound
from tests.kernels import formulas

OP = Op("sample")
DRAWS = 20_000
# Upper 0.1 % point of χ² for 10 degrees of freedom.
CRITICAL = 29.59


@pytest.fixture(params=["reference", "kernel"])
def sample(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    fn: Callable[..., torch.Tensor] = OP.reference if request.param == "reference" else bound(OP)
    return fn


def _settings(
    rows: int,
    device: torch.device,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 17,
) -> dict[str, Any]:
    return {
        "rows": torch.arange(rows, dtype=torch.int32, device=device),
        "temperature": torch.full((rows,), temperature, device=device),
        "top_k": torch.full((rows,), top_k, dtype=torch.int32, device=device),
        "top_p": torch.full((rows,), top_p, device=device),
        "min_p": torch.full((rows,), min_p, device=device),
        "seeds": torch.full((rows,), seed, dtype=torch.int64, device=device),
        "positions": torch.arange(rows, dtype=torch.int32, device=device),
    }


def test_philox_gives_the_published_words() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(word) for word in philox(zero, (zero, zero))]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    seeds, positions = torch.tensor([3, -(2**40)]), torch.tensor([0, 2**31 - 1], dtype=torch.int32)
    made = gumbel(seeds, positions, 9000)
    for row, token in ((0, 0), (0, 1023), (0, 1024), (0, 4095), (1, 4096), (1, 8999)):
        want = formulas.noise(int(seeds[row]), int(positions[row]), token)
        assert float(made[row, token]) == pytest.approx(want, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """χ² of 20,000 positions over 11 tokens. The kernel draws the same tokens (test_ops)."""
    logits = torch.tensor([[0.1, -1.0, 2.0, 0.0, 1.5, 1.0, -0.5, 0.7, 0.3, 1.1, -0.2]])
    tokens = OP.reference(logits.expand(DRAWS, -1), **_settings(DRAWS, torch.device("cpu"), temperature))
    counts = torch.bincount(tokens, minlength=11).double()
    expected = torch.softmax(logits[0].double() / temperature, dim=0) * DRAWS
    assert float(((counts - expected) ** 2 / expected).sum()) < CRITICAL


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    """Pairs of draws at positions n and n + 1, and under seeds s and s + 1, fall on a 4 × 4 table as by chance."""
    flat = torch.zeros(DRAWS, 4)
    settings = _settings(DRAWS, torch.device("cpu"))
    first = OP.reference(flat, **settings)
    later = OP.reference(flat, **{**settings, "positions": settings["positions"] + 1})
    other = OP.reference(flat, **{**settings, "seeds": settings["seeds"] + 1})
    for second in (later, other):
        table = torch.bincount(first * 4 + second, minlength=16).double()
        # 15 degrees of freedom: upper 0.1 % point 37.70.
        assert float(((table - DRAWS / 16) ** 2 / (DRAWS / 16)).sum()) < 37.70


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"top_k": 6, "top_p": 0.7},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.1},
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_filters_keep_exactly_the_set(filters: dict[str, Any], device: torch.device) -> None:
    """Every kept token turns up in 400 draws, ties at the border too; the kernel draws the same ones."""
    logits = torch.tensor([2.0, 2.0, 1.5, 1.5, 1.5, 1.0, 1.0, 0.5, -3.0])
    rows = logits.to(device).expand(400, -1).contiguous()
    tokens = OP.reference(rows, **_settings(400, device, **filters))
    want = formulas.kept(
        logits.tolist(), 1.0, filters.get("top_k", 0), filters.get("top_p", 1.0), filters.get("min_p", 0.0)
    )
    assert sorted(set(tokens.tolist())) == sorted(want)
    some = bound(OP)(rows[:3], **_settings(3, device, **filters))
    assert some.tolist() == tokens[:3].tolist()


def test_a_draw_does_not_depend_on_its_batch(sample: Callable[..., torch.Tensor], device: torch.device) -> None:
    logits = torch.randn(5, 1500, generator=torch.Generator().manual_seed(0)).to(device)
    settings = _settings(5, device, temperature=0.9, top_k=40, top_p=0.9)
    together = sample(logits, **settings)
    alone = [
        sample(logits[i : i + 1], **{**settings, **{name: settings[name][i : i + 1] for name in ("rows", "positions")}})
        for i in range(5)
    ]
    assert together.tolist() == [int(token) for token in alone]


def test_ties_take_the_lowest_id(sample: Callable[..., torch.Tensor], device: torch.device) -> None:
    logits = torch.zeros(2, 5000, device=device)
    logits[0, [4999, 4100, 1030]] = 1.0
    assert sample(logits, **_settings(2, device, temperature=0.0)).tolist() == [1030, 0]


def test_row_without_a_finite_maximum_gives_minus_one(
    sample: Callable[..., torch.Tensor], device: torch.device
) -> None:
    logits = torch.zeros(4, 2000, device=device)
    logits[0, 1500] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, :1999] = float("-inf")
    for settings in (_settings(4, device), _settings(4, device, temperature=0.0), _settings(4, device, top_k=5)):
        assert sample(logits, **settings).tolist() == [-1, -1, -1, 1999]
