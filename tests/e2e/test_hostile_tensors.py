"""Raw gRPC messages that no client library makes: each is answered, and no frontend or tokenizer ends of one."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.serving.link import protocol
from tests.e2e.harness import Call, Server, tokens_of

GOOD = {"text_input": "A server takes a question and", "stream": True, "max_tokens": 12, "temperature": 0.0}
MODELS = {"demo": protocol.LLM_INPUTS, "tokenizer": protocol.TOKENIZER_INPUTS, "ensemble": protocol.ENSEMBLE_INPUTS}
OVERFLOWING = [2**62, 2**62 + 1, 2**63 - 1, 2**61, 2**60, 2**32, -1]


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture(autouse=True)
def unharmed(server: Server) -> Iterator[None]:
    """Every process is there afterwards, and a stream beside goes on as if it had been alone."""
    expected = tokens_of(Call(server, **GOOD).all())
    before = processes(server)
    call = Call(server, **{**GOOD, "max_tokens": 12})
    first = call.next()
    yield
    assert tokens_of([first, *call.all()]) == expected
    assert processes(server) == before


def processes(server: Server) -> set[int]:
    return {*server.stub_pids("demo"), *server.stub_pids("tokenizer")}


def answered(stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest) -> str:
    """What came back, whichever way."""
    try:
        if request.model_name == "tokenizer":
            stub.ModelInfer(request, timeout=30)
            return "a response"
        return " ".join(answer.error_message for answer in stub.ModelStreamInfer(iter([request]), timeout=30))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise AssertionError(f"nobody answered {request}") from None
        return str(error.details())


def request_of(model: str, tensors: list[tuple[protocol.Tensor, list[int], bytes]]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for tensor, shape, content in tensors:
        datatype = "BYTES" if tensor.dtype == "STRING" else tensor.dtype
        request.inputs.add(name=tensor.name, datatype=datatype, shape=shape)
        request.raw_input_contents.append(content)
    return request


@pytest.mark.parametrize(("model", "name"), [("demo", "input_ids"), ("tokenizer", "token_ids")])
@pytest.mark.parametrize("size", OVERFLOWING)
def test_a_shape_that_overflows_is_answered(
    server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub, model: str, name: str, size: int
) -> None:
    tensor = next(tensor for tensor in MODELS[model] if tensor.name == name)
    assert answered(stub, request_of(model, [(tensor, [size], b"")]))
    assert answered(stub, request_of(model, [(tensor, [size], b"\1\0\0\0")]))


def test_a_local_servers_ports_are_closed_to_other_machines(server: Server) -> None:
    """As every server of these tests is started (`nereid serve --host 127.0.0.1`)."""
    listening = [c.laddr for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
    assert {address.port for address in listening} >= {server.http_port, server.grpc_port, server.metrics_port}
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


@st.composite
def requests(draw: st.DrawFn) -> service_pb2.ModelInferRequest:
    model = draw(st.sampled_from(sorted(MODELS)))
    tensors = draw(st.lists(st.sampled_from(MODELS[model]), min_size=1, max_size=4, unique_by=lambda t: t.name))
    sizes = st.sampled_from([0, 1, 2, *OVERFLOWING]) | st.integers(0, 2**63 - 1)
    made = []
    for tensor in tensors:
        shape = draw(st.lists(sizes, min_size=0, max_size=3) | st.just([1]) | st.just([1, 1]))
        content = draw(st.binary(max_size=24) | st.just(b"\1\0\0\0a") | st.just(b"\1\0\0\0") | st.just(b"\1"))
        made.append((tensor, shape, content))
    return request_of(model, made)


@given(request=requests())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_tensors_are_answered(
    server: Server, stub: service_pb2_grpc.GRPCInferenceServiceStub, request: service_pb2.ModelInferRequest
) -> None:
    answered(stub, request)
