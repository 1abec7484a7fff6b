"""The JavaScript SDKs, litellm and programs for agents, unchanged, against the shim and a real server.
`make test-sdks` installs them under .cache/sdks; without it these are skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

HERE = Path(__file__).parent
INSTALLED = HERE.parents[2] / ".cache" / "sdks"
LITELLM = INSTALLED / "litellm" / "bin" / "python"
AGENTS = INSTALLED / "agents" / "bin" / "python"


def run(command: list[str], folder: Path, **more: str) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **more}, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("name", ["openai", "anthropic", "ai"])
@pytest.mark.skipif(not (INSTALLED / "node_modules").is_dir(), reason="make test-sdks installs the JavaScript SDKs")
def test_an_sdk_for_javascript(shim: Shim, tmp_path: Path, name: str) -> None:
    # Node looks for packages beside the script.
    (tmp_path / "node_modules").symlink_to(INSTALLED / "node_modules")
    shutil.copy(HERE / f"{name}.mjs", tmp_path)
    run(["node", "--test", "--test-reporter=spec", f"{name}.mjs"], tmp_path, NEREID_URL=shim.url)


@pytest.mark.skipif(not LITELLM.exists(), reason="make test-sdks installs litellm")
def test_litellms_adapters(shim: Shim, tmp_path: Path) -> None:
    run([str(LITELLM), str(HERE / "litellm_calls.py"), shim.url], tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")


@pytest.mark.skipif(
    not AGENTS.exists(), reason="make test-sdks installs instructor, langchain, pydantic-ai and openai-agents"
)
def test_programs_for_agents_and_structured_answers(shim: Shim, tmp_path: Path) -> None:
    run([str(AGENTS), str(HERE / "agents_calls.py"), shim.url], tmp_path)
