"""Where the oracle itself cannot be compared with: the sequences that the gate leaves out, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import registry
from engine.types import TokenLogprobs
from tests.gate.conftest import as_param
from tests.gate.families import FAMILIES, GPT_OSS, ON_AN_EDGE
from tests.gate.oracle import FORCED, Sequence, WideProducts, golden, random_model
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import NUM_LOGPROBS, REGRET, WORST, judge

# How far embeddings move, of their value (in bfloat16 to the next number at most), and how often that is tried.
ROUNDING = {"float32": 3e-7, "bfloat16": 2.0**-8}
TRIES = {"float32": 12, "bfloat16": 24}
SKIPPED = [as_param(shape) for shape in FAMILIES if shape.name in ON_AN_EDGE]


@pytest.mark.parametrize("shape", SKIPPED, indirect=True)
def test_sequences_that_are_left_out_stand_on_an_edge(shape: Shape, pytestconfig: pytest.Config) -> None:
    """Embeddings that move by a rounding error move transformers' own log-probabilities beyond the limit there, and
    not those of their neighbours."""
    import transformers

    truth = golden(shape, Path(pytestconfig.rootpath) / ".cache" / "gate")
    kind = getattr(transformers, f"{shape.kind}ForCausalLM")
    for place, dtype in ON_AN_EDGE[shape.name].items():
        model = kind.from_pretrained(truth.folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
        assert not all(steady(model, truth.sequences[place], dtype))
        assert all(steady(model, truth.sequences[place + 1], dtype))


def steady(model: Any, sequence: Sequence, dtype: str) -> list[bool]:
    """Whether a model whose embeddings have moved stays within the gate's limit of a position, try by try. They are
    where they were afterwards."""
    tries = []
    weight, generator = model.get_input_embeddings().weight.data, torch.Generator().manual_seed(1)
    exact = weight.clone()
    for _ in range(TRIES[dtype]):
        moves = 1 + ROUNDING[dtype] * (2 * torch.rand(exact.shape, generator=generator) - 1)
        weight.copy_(exact.float() * moves)
        with torch.inference_mode(), WideProducts():
            logits = model(torch.tensor([sequence.prompt + sequence.forced]), logits_to_keep=FORCED + 1).logits[0]
        best = logits.float().log_softmax(-1).topk(NUM_LOGPROBS)
        said = [
            TokenLogprobs([ids[0], *ids], [values[0], *values], [1, *range(1, NUM_LOGPROBS + 1)])
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        verdict = judge([sequence], [said], dtype)
        tries.append(verdict.worst <= WORST if dtype == "float32" else verdict.regret <= REGRET)
    weight.copy_(exact)
    return tries


def test_every_family_that_is_served_is_held_to_transformers() -> None:
    """A `Shape` that stands in no list is not played."""
    played = {registry.FAMILIES[f"{shape.kind.removesuffix('Text')}ForCausalLM"] for shape in (*SHAPES, *FAMILIES)}
    assert played == set(registry.FAMILIES.values())


def test_an_oracle_that_says_something_else_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    with pytest.raises(RuntimeError, match=r"transformers 5\.17\.0 .* install one of them"):
        random_model(GPT_OSS)
