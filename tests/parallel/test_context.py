"""A cache of latents that ranks share out: every token is on one rank, and the engine knows nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from engine.api import Engine
from engine.cache.spec import Group, LatentKV, PoolSpec
from engine.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RuntimeConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.models.reader import ConfigError
from engine.parallel.communicator import Communicator
from engine.parallel.context import SharedContext, own_tokens
from engine.runner.memory import size_pools
from kernels.latent_partials.reference import latent_partials
from tests.gate.families import QWEN3_MOE
from tests.gate.oracle import random_model
from tests.parallel.ranks import together, with_engine
from tests.runner import test_mtp
from tests.runner.proposals import prompts, run
from tests.runner.test_drafts import Heard, same
from tests.runner.test_graphs import Recorder

SLICED = ParallelConfig(tensor=2, context="sliced")
LATENTS = Group(LatentKV(8, 4, 4), (0,))


@given(st.integers(1, 5), st.sampled_from([1, 4, 16]), st.integers(1, 200))
def test_every_token_is_on_one_rank_and_read_there(ranks: int, kept: int, length: int) -> None:
    size = ranks * kept
    positions = torch.arange(length, dtype=torch.int32)
    blocks = torch.randperm(-(-length // size)) + 1
    slots = blocks[positions // size].long() * size + positions % size
    places, read = [], torch.zeros(length, dtype=torch.int64)
    for rank in range(ranks):
        pool = PoolSpec((LATENTS,), (9,), size, rank=rank, ranks=ranks)
        own = own_tokens([slots], positions, pool)
        if own is None:
            assert ranks == 1
            return
        here = own.slots[0] >= 0
        places.append(here)
        # What a token reads here are the first slots of the row's blocks, in order.
        row = (blocks[:, None] * kept + torch.arange(kept)).flatten()
        assert torch.equal(own.slots[0][here], row[: int(here.sum())])
        assert torch.equal(own.context_len.long(), here.cumsum(0))
        read += own.context_len
    assert torch.equal(torch.stack(places).sum(0), torch.ones(length, dtype=torch.int64))
    assert torch.equal(read, positions + 1)


def test_padding_is_kept_by_nobody() -> None:
    for rank in range(2):
        pool = PoolSpec((LATENTS,), (9,), 8, rank=rank, ranks=2)
        own = own_tokens([torch.tensor([-1, -1])], torch.tensor([0, 5], dtype=torch.int32), pool)
        assert own is not None
        assert own.slots[0].tolist() == [-1, -1]


def test_attention_over_ranks_is_attention_over_all() -> None:
    """Of uneven heads; one rank has nothing of the first query's tokens, and nobody any of the last's."""
    heads, kept, latent, rope = [2, 1, 1], 4, 6, 2
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(4, 3 * kept, latent + rope, generator=generator)
    q = torch.randn(3, sum(heads), latent + rope, generator=generator)
    table, lengths = torch.tensor([[1, 2], [3, 0], [0, 0]], dtype=torch.int32), torch.tensor([17, 5, 0])
    want, _ = latent_partials(q, cache, table, lengths.int(), 0.3, latent, 24)

    def work(communicator: Communicator) -> torch.Tensor:
        rank, first = communicator.rank, sum(heads[: communicator.rank])
        shared = SharedContext(communicator, heads[rank], latent + rope, torch.device("cpu"))
        own = cache[:, rank * kept : (rank + 1) * kept].contiguous()
        assert torch.equal(shared.whole_blocks(own), cache.view(-1, kept, latent + rope))
        here = lengths // (3 * kept) * kept + (lengths % (3 * kept) - rank * kept).clamp(0, kept)
        asked = shared.all_heads(q[:, first : first + heads[rank]].contiguous())
        return shared.own_heads(*latent_partials(asked, own, table, here.int(), 0.3, latent, 8), torch.float32)

    given = torch.cat(together(3, work), dim=1)
    assert torch.equal(given[2], torch.zeros_like(given[2]))
    torch.testing.assert_close(given, want)


def test_the_pool_of_ranks_is_as_many_times_larger() -> None:
    specs = [(LatentKV(8, 4, 4),)] * 3
    scheduler = SchedulerConfig(max_rows=64)
    one = size_pools(specs, CacheConfig(), scheduler, 1 << 20, 1 << 20)
    two = size_pools(specs, CacheConfig(), scheduler, 1 << 20, 1 << 20, rank=1, ranks=2)
    assert two.num_blocks == one.num_blocks
    assert (two.block_size, two.block_share) == (2 * one.block_size, one.block_share)


def heard_of(config: EngineConfig, times: int = 1, padded: bool = False) -> tuple[list[Heard], Any]:
    """What requests of all lengths are answered, so many times, and how it went. padded: as in graphs."""

    def use(engine: Engine) -> tuple[list[Heard], Any]:
        return [run(engine, prompts(6, temperature=0.0)) for _ in range(times)], engine.stats()

    return with_engine(config, use, (lambda runner: runner.use_graphs(Recorder())) if padded else None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_mtp.module("deepseek-v3").write(tmp_path_factory.mktemp("latents"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> Heard:
    return heard_of(replace(of(folder, num_blocks=60), parallel=ParallelConfig()))[0][0]


def of(folder: Path, method: str = "none", **cache: Any) -> EngineConfig:
    speculation = SpeculationConfig() if method == "none" else SpeculationConfig(method=method, tokens=3)
    return EngineConfig(
        model=str(folder),
        scheduler=SchedulerConfig(max_rows=3, token_budget=90),
        cache=CacheConfig(**{"num_blocks": 20, **cache}),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
        parallel=SLICED,
        speculation=speculation,
    )


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "padded"])
def test_an_engine_says_the_same(folder: Path, expected: Heard, padded: bool) -> None:
    """In chunks, then with all that the prefix tree holds."""
    (first, again), stats = heard_of(of(folder), 2, padded)
    same(first, expected)
    same(again, expected)
    assert stats.prefix_hit_tokens > 0


def test_requests_are_computed_again_where_blocks_run_out(folder: Path, expected: Heard) -> None:
    (heard,), stats = heard_of(of(folder, num_blocks=7))
    same(heard, expected)
    assert stats.preemptions > 0


@pytest.mark.parametrize("method", [pytest.param("ngram", marks=pytest.mark.slow), "mtp"])
def test_drafts_change_no_token(folder: Path, expected: Heard, method: str) -> None:
    (heard,), stats = heard_of(of(folder, method))
    same(heard, expected)
    assert stats.draft_tokens > stats.accepted_tokens


def test_latents_of_8_bits_are_shared_out_as_well(folder: Path) -> None:
    config = of(folder, dtype="fp8", num_blocks=40)
    (alone,), _ = heard_of(replace(config, parallel=ParallelConfig()))
    (shared,), _ = heard_of(config)
    same(shared, alone)


def test_what_keeps_other_things_is_refused(folder: Path, tmp_path: Path) -> None:
    def refused(config: EngineConfig, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            with_engine(config, lambda engine: None)

    config = of(folder)
    refused(replace(config, runtime=replace(config.runtime, deterministic=True)), "leave one of them out")
    for method in ("draft", "eagle3"):
        speculation = SpeculationConfig(method=method, model=str(folder))
        refused(replace(config, speculation=speculation), f"what drafts with speculation.method {method}")
    random_model(QWEN3_MOE).save_pretrained(tmp_path)
    refused(replace(config, model=str(tmp_path)), "layers of AttentionConfig: leave it at whole")


def test_one_rank_has_all_tokens(folder: Path, expected: Heard) -> None:
    (heard,), _ = heard_of(replace(of(folder, num_blocks=60), parallel=ParallelConfig(context="sliced")))
    same(heard, expected)
