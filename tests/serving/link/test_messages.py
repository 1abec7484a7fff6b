"""What crosses the link comes out as it went in."""

from __future__ import annotations

from array import array

import pytest

from engine.serving.link import messages
from engine.serving.link.messages import Submit
from engine.types import RequestInput, SamplingParams


@pytest.mark.parametrize("kind", [list, lambda ids: array("i", ids)])
def test_a_request_travels_with_its_prompt_as_bytes(kind: type[list[int]]) -> None:
    ids = [0, 7, 2**31 - 1, *range(20_000)]
    request = RequestInput(
        request_id="r",
        prompt_ids=kind(ids),
        params=SamplingParams(max_tokens=3, seed=5, stop=("x",)),
        output_ids=[1, 2],
        bad_word_ids=[[3, 4]],
    )
    data = messages.encode(Submit.of("f0", request))
    assert len(data) < 4 * len(ids) + 200
    got = messages.decode_to_engine(data)
    assert isinstance(got, Submit)
    whole = got.whole()
    assert list(whole.prompt_ids) == ids
    assert (whole.request_id, whole.params, whole.output_ids) == ("r", request.params, [1, 2])
    assert whole.bad_word_ids == [[3, 4]]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_a_token_id_that_is_no_32_bit_integer_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        Submit.of("f0", RequestInput(request_id="r", prompt_ids=[token], params=SamplingParams()))
