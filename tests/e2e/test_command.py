"""The `nereid` command over a real server: add a checkpoint that transformers saved, serve it, stop it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.serving.launch import serve_loop
from tests.e2e.harness import Call, Server, free_ports, tokens_of, wait_until
from tests.serving.stand_in_hub import StandInHub

NEREID = [sys.executable, "-m", "engine.serving.launch.cli"]
PROMPT = "A server takes a question and"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> tuple[Path, LlamaForCausalLM]:
    """A Llama of another shape than the demo's, with its own tokenizer files, as save_pretrained writes them."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"), eos_token="<|endoftext|>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model


def test_added_checkpoint_answers_as_transformers_does(
    server: Server, models: Path, saved: tuple[Path, LlamaForCausalLM]
) -> None:
    folder, model = saved
    subprocess.run([*NEREID, "add", str(folder), "--name", "added", "--model-repository", str(models)], check=True)
    assert server.load("added_ensemble") is None, "the ensemble brings its parts"
    fields = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    got = tokens_of(Call(server, "added", text_input=PROMPT, sampling_parameters=json.dumps(fields)).all())
    ids = Call(server, "added_tokenizer", text_input=PROMPT).all()[0]["input_ids"]
    reference = model.generate(
        torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False, suppress_tokens=None
    )
    assert got == reference[0, len(ids) :].tolist()
    joined = Call(server, "added_ensemble", text_input=PROMPT, max_tokens=16, temperature=0.0, end_id=-1,
                  parameters={"ignore_eos": True}).all()  # fmt: skip
    assert tokens_of(joined) == got


def test_serve_shows_what_it_does_answers_and_stops_on_ctrl_c(models: Path, tmp_path: Path) -> None:
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*NEREID, "serve", "--model-repository", str(models), "--model", "demo", "--host", "127.0.0.2", *ports],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: serve_loop.is_ready(http, "127.0.0.2"), "it is ready")
        wait_until(lambda: f"ready: HTTP http://127.0.0.2:{http}" in log.read_text(), "it says so")
        assert not serve_loop.is_ready(http), "nobody listens elsewhere"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
    assert "demo: weights" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_serve_fetches_a_model_by_its_name_and_leaves_nothing_but_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    hub = StandInHub()
    hub.add("someone/Demo", checkpoint)
    temporary = tmp_path / "t"
    temporary.mkdir()
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    short = tempfile.TemporaryDirectory(prefix="nereid-")  # a socket's path has at most 107 bytes
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "TMPDIR": str(temporary)}
    variables["NEREID_RUN_DIR"] = short.name
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                *NEREID,
                "serve",
                "someone/Demo",
                "--host",
                "127.0.0.1",
                "--frontends",
                "1",
                "--set",
                "max_model_len=256",
                *ports,
            ],
            env=os.environ | variables,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "ready: HTTP" in log.read_text() or process.poll() is not None, "it is ready")
        fields = {"text_input": "The queue module implements", "max_tokens": 4, "temperature": 0.0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{http}/v2/models/Demo/generate_stream", json.dumps(fields).encode()
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert "text_output" in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        hub.close()
        short.cleanup()
    assert list(temporary.glob("nereid-models-*")) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a/b", "--model-repository", "m"], "CHECKPOINT is served alone"),
        (["--revision", "main"], "are for a CHECKPOINT"),
        (["--set", "max_model_len=64"], "are for a CHECKPOINT"),
    ],
)
def test_serve_refuses_what_goes_with_a_checkpoint_alone(words: list[str], sentence: str) -> None:
    done = subprocess.run([*NEREID, "serve", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert sentence in " ".join(done.stderr.split())


def test_serve_says_why_a_model_does_not_load(models: Path, tmp_path: Path) -> None:
    (tmp_path / "demo" / "1").mkdir(parents=True)
    for name in ("config.pbtxt", "1/model.py"):
        (tmp_path / "demo" / name).write_text((models / "demo" / name).read_text())
    config = (tmp_path / "demo" / "config.pbtxt").read_text()
    (tmp_path / "demo" / "config.pbtxt").write_text(config.replace('"cache.num_blocks"', '"cache.blocks"'))
    http, grpc, metrics = free_ports(3)
    ports = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    done = subprocess.run(
        [*NEREID, "serve", "--model-repository", str(tmp_path), *ports],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "400"},
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: model demo: config.pbtxt has an unknown parameter 'cache.blocks'")
    assert done.stderr.count("unknown parameter") == 1
    assert "Traceback" not in done.stderr
