"""The set-up of a fresh machine, as far as it can be looked at from one that is set up."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("made", "asked"), [("run", "run"), ("dev", "dev"), ("dev", "run")])
def test_what_is_set_up_is_left_alone(bootstrap: ModuleType, tmp_path: Path, made: str, asked: str) -> None:
    (tmp_path / f"nereid-{made}-{bootstrap._digest()}.ready").touch()
    command = [sys.executable, str(ROOT / "bootstrap.py"), asked, "--venv", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list(tmp_path.iterdir())) == 1


def test_another_python_is_taken_where_this_one_does_not_fit(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bootstrap._interpreter() == sys.executable or sys.version_info[:2] == (3, 13)
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"3\.10 to 3\.13; this is 3\.9"):
        bootstrap._interpreter()
    (tmp_path / "uv").touch(mode=0o755)
    assert bootstrap._interpreter() is None
    (tmp_path / "python3.11").symlink_to(sys.executable)
    assert bootstrap._interpreter() == str(tmp_path / "python3.11")


def test_a_machine_without_a_gpu_is_seen_as_one(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    tool.chmod(0o755)
    assert bootstrap._has_gpu()
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert not bootstrap._has_gpu()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert not bootstrap._has_gpu()
