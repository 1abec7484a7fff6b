"""The gate on the device side: the runner's log-probabilities against transformers, however the work is cut.

Broken runners must fail it, or it would prove nothing.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from engine.cache.writes import BlockWrite
from engine.config import EngineConfig
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from tests.gate.conftest import Record, changed
from tests.gate.oracle import FORCED, Golden
from tests.gate.plans import PlanPlayer
from tests.gate.verdict import judge

WHOLE = 1 << 20


def test_batched(runner: DeviceRunner, truth: Golden, dtype: str, record: Record) -> None:
    played = PlanPlayer(runner, WHOLE).play(truth.sequences)
    verdict = record(judge(truth.sequences, played, dtype))
    assert verdict.positions == len(truth.sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict


# A whole prompt in one step takes other kernels, but no other references.
@pytest.mark.parametrize(
    "chunk", [512, pytest.param(WHOLE, marks=pytest.mark.gpu)], ids=["chunks-of-512", "in-one-step"]
)
def test_past_4096_positions(runner: DeviceRunner, truth: Golden, dtype: str, chunk: int, record: Record) -> None:
    assert len(truth.long.prompt) > 4096
    played = PlanPlayer(runner, chunk).play([truth.long])
    verdict = record(judge([truth.long], played, dtype))
    assert verdict.positions == FORCED + 1
    assert verdict.passes(dtype), verdict


def test_a_rerun_is_bit_identical(config: EngineConfig, runner: DeviceRunner, truth: Golden, device: str) -> None:
    """The same plans on the same runner and on a fresh one: same tokens, same bits of every log-probability."""
    sequences = truth.sequences[:: 1 if device == "cuda" else 4]
    first = PlanPlayer(runner, 64).play(sequences)
    assert PlanPlayer(runner, 64).play(sequences) == first
    assert PlanPlayer(build_runner(config), 64).play(sequences) == first


def test_a_rope_position_off_by_one_fails(config: EngineConfig, truth: Golden, dtype: str, record: Record) -> None:
    runner = build_runner(changed(config, graphs=False))
    for layer in runner._decoder.layers:
        ops = vars(layer.mixer._ops)
        late = {name: queries_one_late(ops[name]) for name in ("rope_attention", "latent_write", "shared_kv_write")}
        layer.mixer._ops = SimpleNamespace(**{**ops, **late})
    verdict = record(judge(truth.sequences, PlanPlayer(runner, WHOLE).play(truth.sequences), dtype))
    assert not verdict.passes(dtype), verdict


def queries_one_late(write: Any) -> Any:
    """Rotates queries by their position plus one. (Keys as well would change nothing: rope is relative.)"""
    names = list(inspect.signature(write).parameters)
    positions, slots = names.index("positions"), names.index("slots")

    def broken(*inputs: Any, **options: Any) -> Any:
        write(*inputs, **options)
        late = list(inputs)
        late[positions], late[slots] = inputs[positions] + 1, inputs[slots].new_full(inputs[slots].shape, -1)
        return write(*late, **options)

    return broken


def test_a_swapped_block_fails(runner: DeviceRunner, truth: Golden, dtype: str, record: Record) -> None:
    """Once the prompts are computed, neighbours exchange their first blocks."""
    player = PlanPlayer(runner, WHOLE)
    tracks = player.deal(truth.sequences)
    player.bind(tracks)
    player.advance(tracks)
    group = next(i for i, count in enumerate(runner.info.pool.num_blocks) if count)
    for track, other in zip(tracks[::2], tracks[1::2], strict=False):  # the last of an odd number keeps its own
        player.write(BlockWrite(group, track.row, 0, other.blocks[:1]))
        player.write(BlockWrite(group, other.row, 0, track.blocks[:1]))
    verdict = record(judge(truth.sequences, player.finish(tracks), dtype))
    assert not verdict.passes(dtype), verdict


def test_a_block_of_another_request_fails(runner: DeviceRunner, truth: Golden, dtype: str, record: Record) -> None:
    """A stale prefix: tracks take a neighbour's first block for their own and compute only what follows."""
    player = PlanPlayer(runner, WHOLE)
    size = runner.info.pool.block_size
    tracks = player.deal(truth.sequences)
    player.run(tracks)
    again = player.deal(truth.sequences)
    for track, other in zip(again, again[1:] + again[:1], strict=True):
        if len(track.sequence.prompt) > size and len(other.sequence.prompt) > size:
            track.blocks = [other.blocks[0], *track.blocks[1:]]
            track.done = size
    verdict = record(judge(truth.sequences, player.run(again), dtype))
    assert not verdict.passes(dtype), verdict
