"""What a rank takes of packed numbers and of scales: those of its own outputs or inputs, or a refusal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.parallel.shard import Shard
from engine.parallel.slices import Cut
from engine.weights import staging
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.runs import Piece
from kernels.sizes import cdiv
from tests.gate.integers import words


def taken(cut: Cut, end: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """What a rank reads of a module's tensor; None where that is refused."""
    with tempfile.TemporaryDirectory() as folder:
        save_file({f"m.{end}": tensor.contiguous()}, Path(folder) / "model.safetensors")
        try:
            kept = cut.of(Checkpoint.open(folder).entries[f"m.{end}"], end, Shard(0, 2, {}))
        except WeightsError:
            return None
        view = torch.zeros(kept.shape, dtype=kept.dtype)
        staging.copy([Piece(kept, view)])
    return view


def unpacked(held: torch.Tensor, bits: int) -> torch.Tensor:
    return (held[..., None] >> torch.arange(0, 32, bits) & (1 << bits) - 1).flatten(1)


@given(outputs=st.integers(2, 48), bits=st.sampled_from([2, 4, 8]), data=st.data())
def test_zero_points_in_words_are_those_of_a_ranks_outputs(outputs: int, bits: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, outputs - 1))
    stop = data.draw(st.integers(start + 1, outputs))
    numbers = torch.randint(0, 1 << bits, (3, outputs), generator=torch.Generator().manual_seed(outputs))
    held = taken(Cut("outputs", outputs, ((start, stop),)), "qzeros", words(numbers, bits))
    if held is not None:
        assert torch.equal(unpacked(held, bits)[:, : stop - start], numbers[:, start:stop])


@given(inputs=st.integers(2, 700), group=st.sampled_from([16, 32, 64, 128]), data=st.data())
def test_scales_are_those_of_a_ranks_inputs(inputs: int, group: int, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(range(0, inputs, 16)))
    stop = data.draw(st.sampled_from([*range(start + 16, inputs, 16), inputs]))
    scales = torch.arange(2 * cdiv(inputs, group), dtype=torch.float32).view(2, -1)
    own = taken(Cut("inputs", inputs, ((start, stop),)), "weight_scale", scales)
    if own is None:
        assert start % group or (stop % group and stop != inputs), "what falls on borders of groups is taken"
    else:
        spread = scales.repeat_interleave(group, dim=1)[:, start:stop]
        assert torch.equal(own.repeat_interleave(group, dim=1)[:, : stop - start], spread)
