"""Where frontends and engine meet: what cannot serve as that is refused with a way out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.serving.run_folder import RunFolder, RunFolderError

REMEDY = "set NEREID_RUN_DIR to a short path of a folder of your own"


def test_a_folder_that_nobody_made_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", os.getpid(), "model")
    folder.enter()
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    with folder.leave() as last:
        assert last
    assert not folder.path.exists()


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=rf"too long .* \(107 bytes\): {REMEDY}"):
        RunFolder(tmp_path / ("deep" * 25), os.getpid(), "model").enter()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a temporary folder that all users share anybody may have made it first."""
    stat = Path.stat
    owned = os.stat_result((*stat(tmp_path)[:4], 4242, *stat(tmp_path)[5:]))
    monkeypatch.setattr(Path, "stat", lambda self, **how: owned if self == tmp_path else stat(self, **how))
    with pytest.raises(RunFolderError, match=f"belongs to the user 4242: {REMEDY}"):
        RunFolder(tmp_path, os.getpid(), "model").enter()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=rf"cannot be used \(Not a directory\): {REMEDY}"):
        RunFolder(tmp_path / "file" / "run", os.getpid(), "model").enter()
