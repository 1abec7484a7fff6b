"""`nereid add ORG/NAME` against a hub on this machine, by huggingface_hub itself: all of a checkpoint comes, or a
sentence and no entry."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.demo.make import make
from engine.serving.launch import hub
from tests.serving.launch.test_gguf_folder import write
from tests.serving.stand_in_hub import COMMIT, Repository, StandInHub

NAME = "someone/Tiny-1.0"
WRITTEN = 10 << 20  # bytes that the client writes at a time


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make(folder)
    return folder


@pytest.fixture
def stand_in() -> Iterator[StandInHub]:
    hub = StandInHub()
    yield hub
    hub.close()


@pytest.fixture
def held(stand_in: StandInHub, checkpoint: Path) -> Repository:
    return stand_in.add(NAME, checkpoint)


class Add:
    """Runs `nereid add` in a process of its own, for huggingface_hub reads its variables once."""

    def __init__(self, url: str, folder: Path) -> None:
        self.models, self.home = folder / "models", folder / "hf"
        self._variables = {"HF_ENDPOINT": url, "HF_HOME": str(self.home), "HF_HUB_DISABLE_TELEMETRY": "1"}

    def __call__(self, *words: str, name: str = NAME, wrapper: tuple[str, ...] = (), **variables: str) -> str:
        """All that it prints, when it ends well."""
        done = self.run(name, words, wrapper, variables)
        assert done.returncode == 0, done.stderr
        return self._said(done)

    def refused(self, *words: str, name: str = NAME, wrapper: tuple[str, ...] = (), **variables: str) -> str:
        """The sentence of an add that fails; it has written nothing."""
        done = self.run(name, words, wrapper, variables)
        assert done.returncode == 1, done.stdout + done.stderr
        said = self._said(done)
        assert "Traceback" not in said
        assert said.count("error: ") == 1
        assert not self.models.exists()
        return said.partition("error: ")[2]

    def run(
        self, name: str, words: tuple[str, ...], wrapper: tuple[str, ...], variables: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
        argv = [*wrapper, sys.executable, "-m", "engine.serving.launch.cli", "add", name, *words]
        return subprocess.run(
            [*argv, "--model-repository", str(self.models)],
            env={**own, **self._variables, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=150,
        )

    @staticmethod
    def _said(done: subprocess.CompletedProcess[str]) -> str:
        return " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def add(stand_in: StandInHub, tmp_path: Path) -> Add:
    return Add(stand_in.url, tmp_path)


def test_a_checkpoint_comes_into_the_cache_of_all_programs_and_is_served_from_there(
    add: Add, held: Repository, checkpoint: Path
) -> None:
    held.files |= {
        "pytorch_model.bin": b"x",
        "README.md": b"x",
        "original/a.safetensors": b"x",
        "original/a.json": b"{}",
    }
    tools = "additional_chat_templates/tool_use.jinja"
    held.files |= {tools: b"{{ tools }}"}
    add()
    assert sorted(p.name for p in add.models.iterdir()) == ["Tiny-1.0", "Tiny-1.0_ensemble", "Tiny-1.0_tokenizer"]
    snapshot = add.home / "hub" / "models--someone--Tiny-1.0" / "snapshots" / COMMIT
    assert str(snapshot) in (add.models / "Tiny-1.0" / "config.pbtxt").read_text()
    came = {str(file.relative_to(snapshot)): file.read_bytes() for file in snapshot.rglob("*") if file.is_file()}
    wanted = {file.name: file.read_bytes() for file in checkpoint.iterdir()}
    assert came == {**wanted, tools: b"{{ tools }}"}, "no other file comes"
    held.asked.clear()
    add("--name", "again")
    assert held.fetched() == [], "weights come once"
    add("--name", "offline", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")


def test_a_download_that_is_cut_goes_on_from_there(add: Add, held: Repository) -> None:
    held.files["model.safetensors"] += bytes(12 << 20)
    held.cut["model.safetensors"] = [WRITTEN + 1000]
    add()
    assert held.fetched() == [f"model.safetensors from {at}" for at in (0, WRITTEN)]


def test_a_download_that_keeps_breaking_is_a_sentence_and_whole_files_are_kept(add: Add, held: Repository) -> None:
    held.files["other.safetensors"] = bytes(100)
    held.large |= {"other.safetensors"}
    held.cut["model.safetensors"] = [0] * 20
    assert f"the download of {NAME} broke off" in add.refused()
    held.cut.clear()
    held.asked.clear()
    add()
    assert held.fetched() == ["model.safetensors from 0"]


@pytest.mark.parametrize("file", ["model.safetensors", pytest.param("config.json", marks=pytest.mark.slow)])
def test_bytes_of_another_hash_are_thrown_away(add: Add, held: Repository, file: str) -> None:
    held.wrong.add(file)
    assert f"{file} of {NAME} arrived with another hash" in add.refused()
    held.wrong.clear()
    add()


def test_a_full_disk_is_a_sentence(add: Add, held: Repository) -> None:
    held.files["model.safetensors"] += b"\0" * (2 << 20)
    limit = ("prlimit", f"--fsize={1 << 20}")
    said = add.refused(wrapper=limit)
    assert f"{NAME} does not fit on the disk of {add.home}/hub" in said
    assert "set HF_HOME" in said


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_without_room_is_a_sentence(add: Add, held: Repository) -> None:
    held.files["model.safetensors"] += b"\0" * (2 << 20)
    add.home.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", add.home], check=False).returncode != 0:
        pytest.skip("no disk can be mounted here")
    try:
        assert f"does not fit on the disk of {add.home}/hub (No space left on device)" in add.refused()
    finally:
        subprocess.run(["umount", add.home], check=True)


def test_a_gated_repository_wants_a_token(add: Add, held: Repository, stand_in: StandInHub) -> None:
    held.token = "hf_right"
    said = add.refused()
    assert f"{NAME} is gated: accept its terms at {stand_in.url}/{NAME}" in said
    assert "is gated" in add.refused(HF_TOKEN="hf_wrong")
    add(HF_TOKEN="hf_right")


def test_what_the_hub_does_not_have_is_named(add: Add, held: Repository) -> None:
    assert "has no model some/thing" in add.refused(name="some/thing")
    assert f"{NAME} has no revision v9" in add.refused("--revision", "v9")
    add("--revision", COMMIT)


def test_no_network_and_offline_mode_are_sentences(add: Add, held: Repository) -> None:
    nowhere = "http://127.0.0.1:9"
    assert f"{nowhere} cannot be reached" in add.refused(HF_ENDPOINT=nowhere)
    assert "offline mode is on" in add.refused(HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(
    "answer", [None, *(pytest.param(answer, marks=pytest.mark.slow) for answer in ([], {})), "welcome"]
)
def test_what_is_no_hub_is_a_sentence(add: Add, held: Repository, answer: object) -> None:
    held.answers = [answer]
    assert "answers otherwise than a hub does: is a proxy in between, or HF_ENDPOINT" in add.refused()


def test_a_repository_of_other_weights_is_refused_before_anything_is_fetched(add: Add, held: Repository) -> None:
    held.files = {"config.json": held.files["config.json"], "pytorch_model.bin": b"x", "q4.gguf": b"x"}
    said = add.refused()
    assert "holds no *.safetensors (it has .bin, .gguf)" in said
    assert f"or one of its GGUF models as {NAME}:Q4_K_M" in said
    assert held.asked == []


def test_the_one_gguf_model_that_is_asked_for_comes(
    add: Add, held: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "small.gguf").read_bytes()
    names = ("a-Q4_K_M.gguf", "a-UD-Q4_K_S.gguf", "Q8_0/a-Q8_0-00001-of-00001.gguf", "a-mmproj-Q8_0.gguf")
    held.files |= dict.fromkeys(names, data)
    held.large |= {*names}
    said = add(name=f"{NAME}:q8_0")
    assert "wrote" in said
    assert sorted(p.name for p in add.models.iterdir()) == ["a-Q8_0", "a-Q8_0_ensemble", "a-Q8_0_tokenizer"]
    assert held.fetched() == ["Q8_0/a-Q8_0-00001-of-00001.gguf from 0"]
    link = add.models / "a-Q8_0" / "1" / "checkpoint" / "a-Q8_0-00001-of-00001.gguf"
    assert link.read_bytes() == data
    add("--name", "offline", name=f"{NAME}:Q8_0", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("which", "wanted"),
    [
        ("Q4_K_M", ["a-Q4_K_M.gguf"]),
        ("UD-Q4_K_S", ["a-UD-Q4_K_S.gguf"]),
        ("A-Q8_0-00001-of-00002.gguf", ["Q8_0/a-Q8_0-00001-of-00002.gguf", "Q8_0/a-Q8_0-00002-of-00002.gguf"]),
        ("Q4_K_S", ["a-UD-Q4_K_S.gguf"]),
        ("4_K", "no GGUF model whose name ends in 4_K; there is Q8_0/a-Q8_0, a-Q4_K_M, a-UD-Q4_K_S, b-F16, c-F16"),
        ("F16", "several GGUF models whose name ends in F16; there is b-F16, c-F16"),
    ],
)
def test_which_gguf_model_a_word_means(which: str, wanted: list[str] | str) -> None:
    parts = ["Q8_0/a-Q8_0-00001-of-00002.gguf", "Q8_0/a-Q8_0-00002-of-00002.gguf"]
    files = ["a-Q4_K_M.gguf", "a-UD-Q4_K_S.gguf", "b-F16.gguf", "c-F16.gguf", "mmproj-F16.gguf", *parts, "config.json"]
    if isinstance(wanted, list):
        assert hub._gguf_model(NAME, files, which) == wanted
    else:
        with pytest.raises(hub.HubError, match=f"{NAME} holds {wanted}"):
            hub._gguf_model(NAME, files, which)


def test_weights_in_another_layout_alone_are_none(add: Add, held: Repository) -> None:
    held.files["consolidated.safetensors"] = held.files.pop("model.safetensors")
    assert "holds no *.safetensors: give" in add.refused()


def test_a_checkpoint_that_cannot_be_served_leaves_no_entry(add: Add, held: Repository) -> None:
    held.files["config.json"] = held.files["config.json"].replace(b'"silu"', b'"relu"')
    assert "hidden_act = 'relu' is not implemented" in add.refused()


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("a/b", True),
        ("Qwen/Qwen3-0.6B", True),
        ("a", False),
        ("/a/b", False),
        ("./a/b", False),
        ("a/b/c", False),
        ("a/b.gguf", False),
        ("a/b:Q4_K_M", True),
        ("a/b:", False),
        ("a:b/c", False),
    ],
)
def test_a_name_has_one_slash(text: str, is_name: bool) -> None:
    assert hub.is_name(text) is is_name


def test_a_folder_here_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.is_name("a/b")


def test_revision_of_a_folder_is_refused(add: Add, checkpoint: Path) -> None:
    assert "--revision" in add.refused("--revision", "main", name=str(checkpoint))
