"""Where the oracle itself cannot be compared with: the sequences that the gate leaves out, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.models import registry
from tests.gate.conftest import as_param
from tests.gate.families import FAMILIES, ON_AN_EDGE
from tests.gate.oracle import FORCED, Sequence, golden
from tests.gate.shapes import SHAPES, Shape

# Relative change of the embeddings, and the limit of float32.
ROUNDING, LIMIT = 3e-7, 1e-4
TRIES = 12
SKIPPED = [as_param(shape) for shape in FAMILIES if shape.name in ON_AN_EDGE]


@pytest.mark.parametrize("shape", SKIPPED, indirect=True)
def test_sequences_that_are_left_out_stand_on_an_edge(shape: Shape, pytestconfig: pytest.Config) -> None:
    """Embeddings that move by a rounding error move transformers' own log-probabilities beyond the limit there, and
    not those of their neighbours."""
    import transformers

    truth = golden(shape, Path(pytestconfig.rootpath) / ".cache" / "gate")
    kind = getattr(transformers, f"{shape.kind}ForCausalLM")
    model = kind.from_pretrained(truth.folder, dtype=torch.float32, attn_implementation="eager").eval()
    weight = model.get_input_embeddings().weight.data
    exact, generator = weight.clone(), torch.Generator().manual_seed(1)

    def moves(sequence: Sequence) -> float:
        weight.copy_(exact * (1 + ROUNDING * torch.randn(exact.shape, generator=generator)))
        with torch.inference_mode():
            logits = model(torch.tensor([sequence.prompt + sequence.forced]), logits_to_keep=FORCED + 1).logits[0]
        return float(np.abs(logits.float().log_softmax(-1).numpy() - sequence.logprobs["float32"]).max())

    for place in ON_AN_EDGE[shape.name]:
        assert max(moves(truth.sequences[place]) for _ in range(TRIES)) > LIMIT
        assert max(moves(truth.sequences[place + 1]) for _ in range(TRIES)) < LIMIT


def test_every_family_that_is_served_is_held_to_transformers() -> None:
    """A `Shape` that stands in no list is not played."""
    played = {registry.FAMILIES[f"{shape.kind.removesuffix('Text')}ForCausalLM"] for shape in (*SHAPES, *FAMILIES)}
    assert played == set(registry.FAMILIES.values())
