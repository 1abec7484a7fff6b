"""Fuzz the wire and what a checkpoint brings, with a healthy neighbour beside it: `python -m tests.chaos.fuzz`.

Each target takes inputs that hypothesis makes (the shim's come from schemathesis) and holds that every one is served or
refused by its own kind of error, in time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.demo.make import config_json
from engine.gguf_file import GgufError
from engine.models import registry
from engine.models.reader import ConfigError
from engine.serving.frontend import description, sampling_fields
from engine.serving.launch import gguf_folder
from engine.serving.link import protocol
from engine.text import ChatTemplate
from engine.types import RequestError
from engine.weights.checkpoint import Checkpoint, WeightsError
from tests import gguf_files
from tests.chaos import invariants
from tests.chaos.clients import Load, undisturbed
from tests.chaos.fleet import Fleet
from tests.chaos.fuzz_constraints import fuzz_constraints
from tests.chaos.sized import json_values, sized
from tests.chaos.watch import Heartbeat

_IN_TIME_S = 10.0
# Of 10,000 inputs.
SHARES = {
    "shim": 0.2,
    "tensors": 0.25,
    "templates": 0.15,
    "constraints": 0.1,
    "headers": 0.1,
    "configs": 0.1,
    "generation": 0.05,
    "gguf": 0.05,
}
_NEIGHBOURS = 2
Target = Callable[[int, int], None]


def in_time(what: Callable[[], object], allowed: tuple[type[Exception], ...]) -> None:
    """Raises AssertionError when `what` raises anything else, or takes long."""
    began = time.monotonic()
    with contextlib.suppress(allowed):
        what()
    took = time.monotonic() - began
    assert took < _IN_TIME_S, f"it took {took:.1f} s"


def fuzz_configs(count: int, number: int) -> None:
    """config.json with values, and keys, put in the place of others."""
    plain = config_json(640)
    keys = st.sampled_from(sorted(plain)) | st.text(max_size=12)
    changes = st.dictionaries(keys, json_values | st.integers(-(2**70), 2**70), min_size=1, max_size=4)

    @sized(count, number)
    @given(changes, st.sets(st.sampled_from(sorted(plain)), max_size=2))
    def check(changed: dict[str, Any], gone: set[str]) -> None:
        values = {key: value for key, value in copy.deepcopy(plain).items() if key not in gone} | changed
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(values))
            in_time(lambda: registry.load(folder), (ConfigError,))

    check()


def fuzz_headers(count: int, number: int) -> None:
    """safetensors files whose headers are nearly right, and any bytes."""
    spans = st.integers(-(2**65), 2**65) | st.integers(0, 64) | json_values
    shape = st.lists(st.integers(-2, 2**63) | st.integers(0, 8), max_size=4) | json_values
    dtype = st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "Q4"]) | json_values
    entry = st.fixed_dictionaries({"dtype": dtype, "shape": shape, "data_offsets": st.lists(spans, max_size=3)})
    header = st.dictionaries(st.text(max_size=20), entry | json_values, max_size=4).map(json.dumps).map(str.encode)
    size = st.none() | st.integers(0, 2**64 - 1)

    @sized(count, number)
    @given(header | st.binary(max_size=64), size, st.binary(max_size=64))
    def check(head: bytes, told: int | None, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            file.write_bytes(struct.pack("<Q", len(head) if told is None else told) + head + data)
            in_time(lambda: Checkpoint.open(folder), (WeightsError,))

    check()


def fuzz_generation(count: int, number: int) -> None:
    """generation_config.json: what is taken of it is what a request could send, and what it says of ends of answers."""
    names = st.sampled_from(
        ["temperature", "top_k", "top_p", "min_p", "max_new_tokens", "min_new_tokens", "eos_token_id"]
    )
    numbers = st.integers(-(2**70), 2**70) | st.floats() | json_values

    @sized(count, number)
    @given(st.dictionaries(names | st.text(max_size=8), numbers, max_size=5) | json_values)
    def check(values: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config_json(640)))
            (Path(folder) / "generation_config.json").write_text(json.dumps(values))
            in_time(lambda: registry.load(folder), (ConfigError,))
            msgspec.msgpack.encode(sampling_fields.build(description.sampling(Path(folder))))
            assert description.min_tokens(Path(folder)) >= 0

    check()


def fuzz_gguf(count: int, number: int) -> None:
    """GGUF files some of whose bytes are others: a folder is made of them, or they are refused."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        more = {
            "vocab_size": 300,
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        }
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **more))
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        raw = gguf_files.write(Path(folder) / "w.gguf", config, model.state_dict(), lambda _: "F32").file.read_bytes()
        header = 16_000  # bytes; tensors are behind it
        changes = st.lists(st.tuples(st.integers(0, header), st.integers(0, 255)), max_size=6)

        @sized(count, number)
        @given(changes, st.none() | st.integers(0, len(raw)))
        def check(changed: list[tuple[int, int]], cut: int | None) -> None:
            data = bytearray(raw)
            for at, byte in changed:
                data[at] = byte
            with tempfile.TemporaryDirectory(dir=folder) as made:
                file = Path(made) / "m.gguf"
                file.write_bytes(data[:cut])
                (Path(made) / "out").mkdir()
                in_time(lambda: gguf_folder.write(file, Path(made) / "out"), (GgufError, ConfigError, RequestError))

        check()


_FRAGMENTS = (
    "{{ messages[0]['content'] }}",
    "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "{{ messages | tojson }}",
    "{{ x.y.z }}",
    "{{ 1 / 0 }}",
    "{{ 'a' * 100000 }}",
    "{{ 10 ** 400 }}",
    "{{ 1e308 * 10 | int }}",
    "{{ [] | first }}",
    "{{ raise_exception('no') }}",
    "{% set ns = namespace(a=1) %}{{ ns.a }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% if tools %}{{ tools[0].name }}{% endif %}",
    "{{ messages | sort(attribute='role') }}",
    "{{ strftime_now('%Y') }}",
    "{% include 'x' %}",
    "{{ '%d' % 'a' }}",
    "{% generation %}x{% endgeneration %}",
    "{{",
    "{% for %}",
)


def fuzz_templates(count: int, number: int) -> None:
    """Chat templates put together of pieces, messages of any form. (Loops that do not end are the storm's business:
    they are killed with the process that they run in.)"""
    template = st.lists(st.sampled_from(_FRAGMENTS) | st.text(max_size=30), max_size=6).map("".join)
    message = st.fixed_dictionaries({"role": st.text(max_size=8)}, optional={"content": json_values}) | json_values

    @sized(count, number)
    @given(template, st.lists(message, max_size=3), st.none() | json_values, st.booleans())
    def check(source: str, messages: list[Any], tools: Any, prompt: bool) -> None:
        def render() -> None:
            made = ChatTemplate({"default": source})
            made.render(messages, tools=tools, add_generation_prompt=prompt)

        in_time(render, (RequestError,))

    check()


def fuzz_tensors(count: int, number: int, fleet: Fleet) -> None:
    """Raw gRPC messages: names, dtypes, shapes and contents that do not go together. No frontend may die of one."""
    replica = fleet.replicas[0]
    names = st.sampled_from([tensor.name for tensor in protocol.LLM_INPUTS]) | st.text(max_size=10)
    dtypes = st.sampled_from(["INT32", "BOOL", "BYTES", "FP32", "UINT64", "INT64", "FP16", ""])
    dims = st.lists(st.integers(-2, 2000) | st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1), max_size=3)
    content = st.binary(max_size=64) | st.integers(0, 300).map(bytes) | json_values.map(_bytes_tensor)
    tensor = st.tuples(names, dtypes, dims, st.none() | content)
    before = replica.pids("frontend")

    with grpc.insecure_channel(replica.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        @sized(count, number)
        @given(st.lists(tensor, max_size=4), st.booleans())
        def check(tensors: list[tuple[str, str, list[int], bytes | None]], raw: bool) -> None:
            request = service_pb2.ModelInferRequest(model_name="demo")
            for name, dtype, shape, data in tensors:
                made = request.inputs.add(name=name, datatype=dtype)
                made.shape.extend(shape)
                if raw and data is not None:
                    request.raw_input_contents.append(data)
            limits = request.inputs.add(name="max_tokens", datatype="INT32", shape=[1])
            limits.contents.int_contents.append(2)
            call = stub.ModelStreamInfer(iter([request]), timeout=_IN_TIME_S)
            with contextlib.suppress(grpc.RpcError):
                list(call)
            ways = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
            assert call.code() not in ways, f"no end: {call.details()}"

        check()
    assert replica.pids("frontend") == before, "a frontend died"


def _bytes_tensor(value: Any) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("<I", len(data)) + data


def fuzz_shim(count: int, number: int, fleet: Fleet) -> None:
    """schemathesis, from the shim's own description: no 5xx, every answer as described. The description is narrowed to
    short answers here, so that a request outside of it may be a right one (`tests/clients/openai` holds refusals)."""
    description = httpx.get(f"{fleet.shim.url}/openapi.json").json()
    schemas = description["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 4}
        schemas[name]["properties"]["timeout"] = {"type": "number", "minimum": 60, "maximum": 600}
        schemas[name]["properties"]["n"] = {"type": "integer", "minimum": 1, "maximum": 4}
        schemas[name]["required"].append("max_tokens")
    for name, most in (("ResponsesRequest", "max_output_tokens"), ("MessagesRequest", "max_tokens")):
        schemas[name]["properties"][most] = {"type": "integer", "minimum": 1, "maximum": 4}
        schemas[name]["required"] = sorted({*schemas[name]["required"], most})
    for schema in schemas.values():
        if schema.get("properties", {}).get("model", {}).get("minLength"):
            schema["properties"]["model"] = {"const": "demo"}
    operations = sum(len(methods) for methods in description["paths"].values())
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    with tempfile.TemporaryDirectory() as folder:
        schema_file = Path(folder) / "openapi.json"
        schema_file.write_text(json.dumps(description))
        flags = f"--checks {checks} --phases fuzzing --seed {number}"
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(schema_file), "--url"]
        command += [fleet.shim.url, *flags.split(), "--max-examples", str(max(1, count // operations))]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 0, ended.stdout[-6000:]


def run(inputs: int, number: int, fleet: Fleet, targets: tuple[str, ...] = tuple(SHARES)) -> None:
    """`inputs` inputs in all, while neighbours on the same fleet must not be harmed. Raises AssertionError."""
    alone = {
        "templates": fuzz_templates,
        "constraints": fuzz_constraints,
        "headers": fuzz_headers,
        "configs": fuzz_configs,
        "generation": fuzz_generation,
        "gguf": fuzz_gguf,
    }
    served = {"tensors": fuzz_tensors, "shim": fuzz_shim}
    expected = undisturbed(fleet)
    start = time.monotonic()
    beat, load = Heartbeat(fleet), Load(fleet, number, _NEIGHBOURS)
    beat.start()
    load.start()
    try:
        for name in targets:
            count = max(1, round(inputs * SHARES[name]))
            began = time.monotonic()
            if name in alone:
                alone[name](count, number)
            else:
                served[name](count, number, fleet)
            print(f"{name}: {count} inputs in {time.monotonic() - began:.0f} s", flush=True)
    finally:
        outcomes = load.stop()
        beat.close()
    harmed = invariants.requests(outcomes, expected, [], beat, start)
    assert outcomes
    assert not harmed, harmed
    print(f"{len(outcomes)} requests of neighbours, none harmed", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", nargs="*", choices=sorted(SHARES), default=tuple(SHARES))
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)  # what is left out of a file is a warning each
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the fleet ends with it
    number = random.SystemRandom().randrange(1 << 31) if options.seed is None else options.seed
    print(f"SEED={number} INPUTS={options.inputs}", flush=True)
    with Fleet() as fleet:
        run(options.inputs, number, fleet, tuple(options.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
