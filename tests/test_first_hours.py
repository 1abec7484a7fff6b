"""What a newcomer copies out of README and docs/openai.md answers, and answers in words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.python.local_server import LocalServer
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("server")

ROOT = Path(__file__).parents[1]


def blocks(page: str, language: str) -> list[str]:
    """The code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.fixture(scope="module")
def addresses(demo_server: LocalServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses that the pages name, to those of a server with the demo model and of the shim."""
    triton = f"{demo_server.grpc}:{demo_server.metrics.rsplit(':', 1)[1]}"
    shim = Shim(tmp_path_factory.mktemp("shim"), "--triton", triton)
    yield {"localhost:8000": demo_server.http, "localhost:8001": demo_server.grpc, "localhost:9000": shim.host}
    shim.stop()


def run(command: list[str], code: str, addresses: dict[str, str]) -> str:
    for page, real in addresses.items():
        code = code.replace(page, real)
    done = subprocess.run([*command, code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def commands(page: str) -> list[str]:
    lines = "\n".join(blocks(page, "(?:sh|bash)")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith("curl")]


@pytest.mark.parametrize("command", commands("README.md"))
def test_commands_of_readme_answer(command: str, addresses: dict[str, str]) -> None:
    output = run(["sh", "-c"], command, addresses)
    if "chat" in command:
        text = json.loads(output)["choices"][0]["message"]["content"]
        assert "file" in text  # what was asked for
    else:
        text = "".join(json.loads(line[5:])["text_output"] for line in output.splitlines() if line)
    assert len(text.split()) >= 5, text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("localhost:8000/v2/models/demo/generate", {"text_input": "What is Triton Inference Server?"}),
        ("localhost:9000/v1/completions", {"prompt": "What is Triton Inference Server?"}),
        ("localhost:9000/v1/completions", {"prompt": "Machine learning is"}),
        ("localhost:9000/v1/chat/completions", {"messages": [{"role": "user", "content": "Say this is a test!"}]}),
    ],
)
def test_prompts_of_nvidias_readmes_get_words(path: str, fields: dict[str, object], addresses: dict[str, str]) -> None:
    """vllm_backend's, and those of NVIDIA's OpenAI frontend."""
    body = json.dumps({"model": "demo", "temperature": 0, **fields})
    if "text_input" in fields:
        body = json.dumps({**fields, "parameters": {"stream": False, "temperature": 0}})
    answer = json.loads(
        run(["sh", "-c"], f"curl -sS {path} -H 'Content-Type: application/json' -d '{body}'", addresses)
    )
    if "text_input" in fields:
        text = answer["text_output"].removeprefix(str(fields["text_input"]))
    else:
        text = answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
    assert len(text.split()) >= 3, text


@pytest.mark.parametrize("page", ["README.md", "docs/openai.md"])
def test_python_of_the_pages_runs(page: str, addresses: dict[str, str]) -> None:
    codes = blocks(page, "python")
    assert codes
    for code in codes:
        if "localhost" in code:
            assert run([sys.executable, "-c"], code, addresses).strip()
