"""Clients that others wrote, against the shim and a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from clients.openai.schema import ChatRequest, CompletionRequest
from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

HELLO = "Hello there, 20 \u00b0C out."


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed on this machine")
def test_curl_completes_and_streams(shim: Shim) -> None:
    body = json.dumps({"model": "scripted", "prompt": "h", "temperature": 0, "stream": True})
    command = ["curl", "-sSN", "--fail-with-body", f"{shim.url}/v1/completions", "-H", "Content-Type: application/json"]
    printed = subprocess.run([*command, "-d", body], check=True, capture_output=True, text=True, timeout=30).stdout
    events = [line.removeprefix("data: ") for line in printed.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == HELLO


def test_langchain_talks_streams_and_calls_tools(shim: Shim) -> None:
    options: dict[str, Any] = {"base_url": f"{shim.url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(model="scripted", **options)
    conversation = [SystemMessage("Be brief."), HumanMessage("h")]
    assert chat.invoke(conversation).content == HELLO
    assert "".join(str(chunk.content) for chunk in chat.stream(conversation)) == HELLO
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    answer = chat.bind_tools([tool]).invoke([HumanMessage("w")])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [
        ("get_weather", {"city": "Paris", "days": 2})
    ]
    assert OpenAI(model="scripted", **options).invoke("h") == HELLO


def test_tritonclient_reads_the_same_models(server: LocalServer) -> None:
    """The shim hides nothing: gRPC and HTTP clients of Triton see the same repository beside it."""
    with triton_grpc.InferenceServerClient(server.grpc) as grpc_client:
        assert grpc_client.is_model_ready("scripted")
    http_client = triton_http.InferenceServerClient(server.http)
    assert {m["name"] for m in http_client.get_model_repository_index()} >= {"demo", "scripted", "demo_tokenizer"}
    http_client.close()


def reachable(description: dict[str, Any]) -> dict[str, Any]:
    """The description narrowed to requests that reach the engine and end soon: a model that exists, few tokens."""
    schemas = description["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["properties"]["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 4}
        schemas[name]["properties"]["timeout"] = {"type": "number", "minimum": 60, "maximum": 600}
        schemas[name]["required"].append("max_tokens")
    for schema in schemas.values():
        if schema.get("properties", {}).get("model", {}).get("minLength"):
            schema["properties"]["model"] = {"const": "scripted"}
    return description


@pytest.mark.parametrize("examples", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_no_request_made_from_the_description_breaks_the_shim(shim: Shim, tmp_path: Path, examples: int) -> None:
    """schemathesis: every status is a described one, every body fits its schema, wrong requests are refused, no 500."""
    schema = tmp_path / "openapi.json"
    schema.write_text(json.dumps(reachable(httpx.get(f"{shim.url}/openapi.json").json())))
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    flags = f"--checks {checks},negative_data_rejection --phases coverage,fuzzing --max-examples {examples} --seed 7"
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        str(schema),
        "--url",
        shim.url,
        *flags.split(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-6000:]


def test_the_description_has_every_field(shim: Shim) -> None:
    parts = httpx.get(f"{shim.url}/openapi.json").json()["components"]["schemas"]
    assert set(parts["CompletionRequest"]["properties"]) == set(CompletionRequest.model_fields)
    assert set(parts["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
