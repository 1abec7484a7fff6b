"""What goes to Triton for a request, and what is made of its responses."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from clients.openai.wire import Generation, Piece, PieceReader, Prompt, from_status, llm_request
from engine.serving.link import protocol


def string(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def message(**tensors: bytes) -> bytes:
    response = service_pb2.ModelStreamInferResponse()
    for name, raw in tensors.items():
        response.infer_response.outputs.add(name=name, shape=[1])
        response.infer_response.raw_output_contents.append(raw)
    return bytes(response.SerializeToString())


def token(text: str, *ids: int, finish: str = "None", **more: bytes) -> bytes:
    return message(
        text_output=string(text),
        token_ids=struct.pack(f"<{len(ids)}i", *ids),
        finish_reason=string(finish),
        num_input_tokens=struct.pack("<I", 7),
        num_cached_tokens=struct.pack("<I", 4),
        **more,
    )


def generation(**fields: Any) -> Generation:
    given = {"prompt": Prompt(text="hé"), "sampling": {"max_tokens": 3}, "stream": True, "deadline": 0.0, **fields}
    return Generation(model="demo", request_id="r-0", **given)


@pytest.mark.parametrize("fields", [{}, {"prompt": Prompt(ids=(5, 6, 7))}, {"logprobs": True, "cumulative": True}])
def test_a_request_has_the_tensors_of_the_wire_table(fields: dict[str, Any]) -> None:
    request = llm_request(generation(**fields), 2.5)
    table = {tensor.name: tensor for tensor in protocol.LLM_INPUTS}
    assert len(request.inputs) == len(request.raw_input_contents)
    for tensor in request.inputs:
        kind = table[tensor.name].dtype
        assert tensor.datatype == ("BYTES" if kind == "STRING" else kind)
    assert {output.name for output in request.outputs} <= {tensor.name for tensor in protocol.LLM_OUTPUTS}
    raw = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    assert json.loads(raw["sampling_parameters"][4:]) == {"max_tokens": 3, "timeout_s": 2.5}
    assert ("input_ids" in raw) != ("text_input" in raw)
    assert raw.get("text_input", string("hé")) == string("hé")
    assert raw.get("input_ids", struct.pack("<3i", 5, 6, 7)) == struct.pack("<3i", 5, 6, 7)


def test_two_requests_share_nothing() -> None:
    first, second = llm_request(generation(), 1), llm_request(generation(prompt=Prompt(ids=(1,))), 1)
    assert len(first.inputs) == len(second.inputs)
    assert first.inputs[-1].name != second.inputs[-1].name


def test_pieces_of_a_stream() -> None:
    reader = PieceReader(3)
    assert reader.read(token("né", 5)) == Piece("né", (5,), None, 7, 4, 3)
    assert not reader.finished
    assert reader.read(token("", 6, 8, finish="length")) == Piece("", (6, 8), "length", 7, 4, 3)
    assert reader.finished
    assert reader.read(message()) is None  # the empty response that ends a stream
    assert reader.failure is None


def test_log_probabilities_come_along_when_they_were_asked_for() -> None:
    entry = [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"}}]
    cumulative = struct.pack("<f", -0.5)
    piece = PieceReader(0).read(token("a", 5, logprobs=string(json.dumps(entry)), cumulative_logprob=cumulative))
    assert piece is not None
    assert (piece.logprobs, piece.cumulative_logprob, piece.prompt_logprobs) == (entry, -0.5, None)


def test_an_error_in_the_middle_of_a_stream_has_its_code() -> None:
    reader = PieceReader(0)
    reader.read(token("a", 5))
    told = json.dumps({"code": "UNAVAILABLE", "message": "the engine is gone"})
    assert reader.read(message(text_output=string(""), error=string(told))) is None
    assert reader.failure is not None
    assert (reader.failure.code, reader.failure.message, reader.failure.refused) == (
        "UNAVAILABLE",
        "the engine is gone",
        True,
    )


def test_a_deadline_is_not_retried_elsewhere() -> None:
    reader = PieceReader(0)
    reader.read(message(error=string(json.dumps({"code": "INTERNAL", "message": "it ran past its timeout of 2 s"}))))
    assert reader.failure is not None
    assert reader.failure.code == "DEADLINE_EXCEEDED"
    assert not reader.failure.retryable


def test_a_model_that_has_gone_since_the_last_look_is_unavailable() -> None:
    reader = PieceReader(0)
    gone = service_pb2.ModelStreamInferResponse(error_message="Request for unknown model: 'demo' is not found")
    assert reader.read(gone.SerializeToString()) is None
    assert reader.failure is not None
    assert reader.failure.retryable
    assert "demo" not in reader.failure.message  # addresses and names of the inside are for the log


def test_an_inner_failure_of_the_server_is_told_by_an_id_that_the_log_has(caplog: pytest.LogCaptureFixture) -> None:
    error = from_status("INTERNAL", 'Traceback: File "/srv/engine/serving/frontend/frontend.py", line 7')
    assert "/srv" not in error.message
    assert error.message.endswith(f"{caplog.records[-1].args[0]}.")
    assert "/srv/engine" in caplog.text
    assert error.to_api().status == 500
