"""A few hundred fuzzed inputs with a healthy neighbour; `make fuzz` sends 10,000. They come last: tritonserver 2.51
never gives up a request with a wrong dtype, so a model that had one is not unloaded any more."""

from __future__ import annotations

import pytest

from tests.chaos import fuzz
from tests.chaos.conftest import Keeper


@pytest.mark.parametrize("target", [fuzz.fuzz_configs, fuzz.fuzz_headers, fuzz.fuzz_templates, fuzz.fuzz_generation])
def test_what_a_checkpoint_brings_is_taken_or_refused(target: fuzz.Target) -> None:
    target(100, 22)


@pytest.mark.parametrize("target", [fuzz.fuzz_gguf, fuzz.fuzz_constraints])
def test_what_takes_longer_is_taken_or_refused_too(target: fuzz.Target) -> None:
    target(40, 22)


def test_raw_tensors_harm_no_neighbour(keeper: Keeper) -> None:
    try:
        fuzz.run(300, 22, keeper.fleet(), ("tensors",))
    finally:
        keeper.discard()
