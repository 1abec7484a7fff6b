"""A Triton request's tensors and parameters, combined and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.serving import protocol
from engine.serving.decode import LlmRequest, llm_request
from engine.types import RequestError

OUTPUTS = frozenset({protocol.TOKEN_IDS})


def decoded(json: bytes, parameters: dict[str, Any] | None = None, timeout_us: int = 0, **more: Any) -> LlmRequest:
    tensors = {
        protocol.INPUT_IDS: np.array([1, 2, 3], np.int32),
        protocol.SAMPLING_PARAMETERS: np.array([json], np.object_),
        **{name: np.array([value]) for name, value in more.items()},
    }
    return llm_request(tensors, parameters or {}, OUTPUTS, timeout_us)


def test_the_same_json_again_means_the_same() -> None:
    first, again = decoded(b'{"max_tokens": 5, "seed": 3}'), decoded(b'{"max_tokens": 5, "seed": 3}')
    assert first.params == again.params
    assert (again.params.max_tokens, again.params.seed, list(again.input_ids or ())) == (5, 3, [1, 2, 3])


def test_what_comes_besides_a_json_counts_each_time() -> None:
    json = b'{"max_tokens": 5}'
    assert decoded(json).params.temperature == 1.0
    assert decoded(json, temperature=np.float32(0.5)).params.temperature == 0.5
    assert decoded(json, {"temperature": 0.25}).params.temperature == 0.25
    assert decoded(json, timeout_us=2_000_000).params.timeout_s == 2.0
    assert decoded(json, end_id=np.int32(7)).params.stop_token_ids == (7,)
    assert decoded(json).params == decoded(b'{"max_tokens":5}').params


def test_a_wrong_json_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="unknown sampling parameter 'max_token'"):
            decoded(b'{"max_token": 5}')


def test_what_may_only_be_neutral_is_refused_beside_a_known_json() -> None:
    decoded(b"{}", beam_width=np.int32(1))
    with pytest.raises(RequestError, match="beam search"):
        decoded(b"{}", beam_width=np.int32(2))
