"""Checkpoints of random numbers are such that a model computes with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.types import RequestInput, SamplingParams
from perf import checkpoints

CONFIGS = Path(__file__).parents[1] / "models" / "configs"
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("quantization", ["fp8", "fp8-rows", "w4a16"])
def test_a_model_of_random_numbers_answers(tmp_path: Path, quantization: str) -> None:
    shape = tmp_path / "qwen3-30b-a3b.json"
    shape.write_text(json.dumps({**json.loads((CONFIGS / shape.name).read_text()), **SIZES}))
    folder = checkpoints.write(tmp_path, f"{shape}:{quantization}", vocab=256, layers=2)
    config = EngineConfig(
        model=str(folder),
        max_model_len=64,
        scheduler=SchedulerConfig(max_rows=4, token_budget=64),
        cache=CacheConfig(num_blocks=16, block_size=16),
        runtime=RuntimeConfig(device="cpu"),
    )
    asked = SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [[token, token + 1, token + 2] for token in (1, 50, 100, 200)]
    engine = Engine.from_config(config).start()
    try:
        answers = engine.generate(
            [RequestInput(request_id=str(i), prompt_ids=p, params=asked) for i, p in enumerate(prompts)]
        )
    finally:
        engine.close()
    assert [len(answer.token_ids) for answer in answers] == [4] * 4
    assert len({tuple(answer.token_ids) for answer in answers}) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_every_number_that_is_drawn_is_finite(dtype: torch.dtype) -> None:
    whole = checkpoints.Stored(dtype, (checkpoints.DRAWN,))
    drawn = b"".join(checkpoints._Drawn().pieces("model.norm.weight", whole))
    assert torch.frombuffer(bytearray(drawn), dtype=dtype).float().isfinite().all()
