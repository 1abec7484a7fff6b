"""Sums through memory that processes share: right, the same bits on every rank, whoever comes late."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import env
from engine.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig
from engine.parallel import peers as peers_module
from engine.parallel.communicator import ALONE, Communicator, GroupCommunicator
from engine.parallel.peers import over, pieces_of, reached
from engine.runner.build import build_runner
from engine.types import TokenLogprobs
from kernels.peers import HALVES, PLACES, Peers, piece_bytes
from kernels.registry import Op
from kernels.rms_norm.reference import rms_norm
from kernels.select import select
from kernels.workspace import Workspace
from tests.compiled import environment
from tests.gate.test_ranks import _drawn
from tests.parallel.peer_ranks import CALLS, CPU, EPS, HEADS, partials, queries
from tests.parallel.ranks import together
from tests.runner.tiny import write

Given = list[tuple[torch.Tensor, ...]]


def played(size: int, folder: Path) -> list[dict[str, Given]]:
    """What each of `size` processes got, also with each kernel that is broken."""
    return saved("peer_ranks", [{**environment(folder), "TRITON_INTERPRET": "1"}] * size, folder)


def saved(module: str, environments: Sequence[dict[str, str]], folder: Path) -> list[Any]:
    """What ranks that run `module` wrote, each a process with an environment of its own."""
    arguments = [str(len(environments)), str(folder)]
    command = [sys.executable, "-m", f"tests.parallel.{module}"]
    processes = [
        subprocess.Popen([*command, str(rank), *arguments], env=own, stderr=subprocess.PIPE, text=True)
        for rank, own in enumerate(environments)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(environments))]


def expected(size: int) -> Given:
    made: Given = []
    for number, call in enumerate(CALLS):
        total = torch.zeros(call.tokens, call.width)
        for rank in range(size):
            total += call.inputs(number, rank).float()
        if call.normed:
            residual, weight = call.around(number)
            y, h = rms_norm(total.to(call.dtype), weight, EPS, residual, 1.0)
            made.append((h, y))
        else:
            made.append((total.to(call.dtype),))
    return made


def wrong(given: Given, want: Given) -> list[int]:
    """Calls whose sums are others, bit for bit, or whose norms are."""
    found = []
    for number, (ours, theirs) in enumerate(zip(given, want, strict=False)):
        same = torch.equal(ours[0], theirs[0])
        for a, b in zip(ours[1:], theirs[1:], strict=True):
            same &= torch.allclose(a.float(), b.float(), rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
        if not same:
            found.append(number)
    return found


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_processes_get_the_sum_in_the_order_of_ranks(size: int, tmp_path: Path) -> None:
    given, want = played(size, tmp_path), expected(size)
    for rank, of in enumerate(given):
        got = of[""]
        assert len(got) == len(CALLS) + 1
        assert not wrong(got, want), f"rank {rank}"
        for ours, first in zip(got, given[0][""], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, first, strict=True)), "ranks must hold the same bits"
        assert (got[-1][0] == size * (size + 1) / 2).all()
        check_exchanged(of["exchanged"], rank, size)
    # A sum of two is the same in any order.
    assert any(wrong(of["own part first"], want) for of in given) == (size > 2)
    assert not any(wrong(of["read late"], want) for of in given)
    assert 0 in wrong(given[1]["one half"], want)
    assert any(wrong(of["no wait"], want) for of in given)


def check_exchanged(given: Given, rank: int, size: int) -> None:
    """Each time queries of all heads, and this rank's heads as one rank with all tokens gives them."""
    o, lse = (torch.stack(parts) for parts in zip(*(partials(other, size) for other in range(size)), strict=True))
    want = torch.nan_to_num((torch.softmax(lse, 0)[..., None] * o).sum(0))
    first = sum(HEADS[:rank])
    for queried, merged in given:
        assert torch.equal(queried, queries(size))
        torch.testing.assert_close(merged, want[:, first : first + HEADS[rank]], rtol=1e-5, atol=1e-6)


@pytest.mark.gpus
def test_gpus_get_the_sum_in_the_order_of_ranks(tmp_path: Path) -> None:
    """As calls come, one rank late, and in each replay of a graph that holds them all."""
    given = saved("gpu_ranks", [env.inherited(**env.one_gpu(rank)) for rank in range(2)], tmp_path)
    want = expected(2)
    for rank, (of, exchanged) in enumerate(given):
        check_exchanged(exchanged, rank, 2)
        assert len(of) == 4
        for got, first in zip(of, given[0][0], strict=True):
            assert len(got) == len(CALLS)
            assert not wrong(got, want), f"rank {rank}"
            for ours, others in zip(got, first, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True)), (
                    "ranks must hold the same bits"
                )


def test_pieces_have_slots_for_all_that_a_call_sends() -> None:
    for size, capacity in ((2, 1000), (3, 40_000), (8, 8 << 20), (64, 1000)):
        pieces = [torch.zeros(piece_bytes(size, capacity), dtype=torch.uint8) for _ in range(size)]
        peers = Peers.over(0, pieces)
        assert peers.capacity >= capacity
        assert HALVES * PLACES * size * peers.slot == pieces[0].numel()
        assert peers.slot % 16 == 0


def test_a_sum_that_no_slot_has_place_for_is_refused() -> None:
    pieces = [torch.zeros(piece_bytes(2, 1024), dtype=torch.uint8)] * 2
    with pytest.raises(ValueError, match="take another way"):
        Op("peer_sum").bound(Workspace(CPU))(torch.zeros(300, 100), Peers.over(0, pieces))


def test_norms_that_sums_have_inside_reach_the_layers(tmp_path: Path) -> None:
    """The residual counts once, the norm is the next layer part's, and what is too large goes by the library."""
    config = EngineConfig(
        model=str(write(tmp_path)),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=8, token_budget=512),
        cache=CacheConfig(num_blocks=64),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
        parallel=ParallelConfig(tensor=2),
    )
    prompts = [[5 * i + j for j in range(20 + 3 * i)] for i in range(4)]

    def work(communicator: Communicator, capacity: int) -> tuple[list[TokenLogprobs], list[bool]]:
        assert isinstance(communicator, GroupCommunicator)
        seen = []

        def op(
            x: torch.Tensor, peers: Peers, two_shot: bool, residual: Any = None, weight: Any = None, **norm: Any
        ) -> Any:
            seen.append(weight is not None)
            total = communicator.all_reduce(x)
            if weight is None:
                return total, total
            return rms_norm(total, weight, residual=residual, **norm)

        pieces = [torch.zeros(piece_bytes(2, capacity), dtype=torch.uint8) for _ in range(2)]
        peers = over(communicator, pieces, SimpleNamespace(peer_sum=op), None)  # type: ignore[arg-type]
        return _drawn(build_runner(config, communicator=peers), prompts), seen

    (few, none), (other, _) = together(2, partial(work, capacity=256))
    (many, seen), _ = together(2, partial(work, capacity=1 << 20))
    assert not none
    assert seen.count(True) == 2, "of each layer's mixer"
    assert seen.count(False) == 3, "of the embedding and each layer's feed-forward part"
    assert few == other
    for ours, theirs in zip(many, few, strict=True):
        assert ours.ids == theirs.ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


def test_memory_that_one_rank_cannot_have_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no file of the others is left."""
    before = set(Path("/dev/shm").iterdir())
    fallocate = os.posix_fallocate
    turns = iter(range(3))

    def second_fails(descriptor: int, offset: int, size: int) -> None:
        if next(turns) == 1:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", second_fails)

    def work(communicator: Communicator) -> tuple[Any, str]:
        assert isinstance(communicator, GroupCommunicator)
        return pieces_of(communicator, 4096, CPU)

    given = together(3, work)
    assert [made for made, _ in given] == [None] * 3
    assert sorted(bool(why) for _, why in given) == [True] * 3
    assert any("No space left on device" in why for _, why in given)
    left = {file.name for file in set(Path("/dev/shm").iterdir()) - before}
    assert not [name for name in left if name.startswith("nereid-peers-")]


@pytest.mark.parametrize(("ranks", "largest"), [(2, 64 << 20), (3, 16 << 20), (4, 16 << 20)])
def test_memory_is_for_sums_that_are_faster_than_the_librarys(
    ranks: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def no_place(communicator: GroupCommunicator, size: int, device: torch.device) -> tuple[None, str]:
        asked.append(size)
        return None, "the test has none"

    monkeypatch.setattr(peers_module, "pieces_of", no_place)
    ops = select(Workspace(CPU))
    given = together(ranks, lambda own: reached(own, ops, torch.device("cuda"), False) is own)
    assert given == [True] * ranks
    assert asked == [piece_bytes(ranks, largest)] * ranks


def test_a_cpu_keeps_its_library_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    ops = select(Workspace(CPU))
    assert reached(ALONE, ops, CPU, True) is ALONE

    def work(communicator: Communicator, asked: bool) -> bool:
        return reached(communicator, ops, CPU, asked) is communicator

    with caplog.at_level(logging.WARNING):
        assert together(2, partial(work, asked=False)) == [True, True]
        assert not caplog.records, "nobody asked for them"
        assert together(2, partial(work, asked=True)) == [True, True]
    (said,) = [record.getMessage() for record in caplog.records if "parallel.all_reduce" in record.getMessage()]
    assert "kernels over peer memory are for GPUs" in said
