"""A model that is added with a cache of 8-bit floats, through the real server."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig
from engine.serving.launch.cli import app
from engine.types import RequestInput, SamplingParams
from tests.e2e.harness import Call, Server, tokens_of, wait_until

PROMPT = "Keys and values are kept in eight bits, and what is read is what was kept. " * 4
FIELDS = json.dumps({"max_tokens": 24, "temperature": 0.0, "ignore_eos": True})


def engine_says(checkpoint: Path, cache: str, prompt: list[int]) -> list[int]:
    config = EngineConfig(model=str(checkpoint), cache=CacheConfig(dtype=cache, num_blocks=64))
    engine = Engine.from_config(config).start()
    try:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        return engine.generate([RequestInput(request_id="one", prompt_ids=prompt, params=params)])[0].token_ids
    finally:
        engine.close()


def test_it_answers_as_the_engine_does_and_hits_its_prefix(server: Server, models: Path, checkpoint: Path) -> None:
    words = ["add", str(checkpoint), "--name", "eight", "--model-repository", str(models)]
    settings = ["--set", "cache.dtype=fp8", "--set", "cache.num_blocks=64", "--set", "max_model_len=512"]
    done = CliRunner().invoke(app, [*words, *settings])
    assert done.exit_code == 0, done.output
    assert server.load("eight") is None
    try:
        prompt = Call(server, "tokenizer", text_input=PROMPT).all()[0]["input_ids"]
        want = engine_says(checkpoint, "fp8", prompt)
        heard = [
            tokens_of(Call(server, "eight", text_input=PROMPT, sampling_parameters=FIELDS, stream=True).all())
            for _ in range(2)
        ]
        assert heard == [want, want]
        wait_until(lambda: server.metric("vllm:prefix_cache_hits_total", model="eight") > 0, "the prompt hits", 10.0)
        assert server.metric("vllm:cache_config_info", model="eight", cache_dtype="fp8", num_gpu_blocks="63") == 1
        assert server.metric("vllm:cache_config_info", model="demo", cache_dtype="auto") == 1
    finally:
        server.unload("eight")
