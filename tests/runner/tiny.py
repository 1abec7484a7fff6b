"""A small Llama with dummy weights, and a row that is played step by step."""

from __future__ import annotations

import json
from pathlib import Path

from engine.cache.writes import BlockWrite
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.core.plan import RowStart, StepPlan, StepResult
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from engine.types import SamplingParams

VOCAB = 320
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "eos_token_id": 7,
    "torch_dtype": "float32",
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def write(folder: Path, **config: object) -> Path:
    """Make `folder` a checkpoint for load_format "dummy"."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def make(folder: Path, max_rows: int = 4, runtime: RuntimeConfig | None = None, **config: object) -> DeviceRunner:
    """A runner with 15 blocks a row."""
    write(folder, **config)
    return build_runner(
        EngineConfig(
            model=str(folder),
            load_format="dummy",
            scheduler=SchedulerConfig(max_rows=max_rows, token_budget=256),
            cache=CacheConfig(num_blocks=1 + 15 * max_rows),
            runtime=runtime or RuntimeConfig(),
        )
    )


def start(row: int, tokens: list[int], params: SamplingParams = GREEDY, **more: object) -> RowStart:
    return RowStart(row, tokens, more.pop("num_prompt", len(tokens)), params, **more)  # type: ignore[arg-type]


def blocks(row: int) -> BlockWrite:
    """All of a row's own blocks."""
    return BlockWrite(0, row, 0, list(range(1 + 15 * row, 16 + 15 * row)))


def step(runner: DeviceRunner, entries: list[tuple[int, int, int]], starts: list[RowStart] | None = None) -> StepResult:
    """Run entries (row, first, count), all of which sample; started rows get their blocks."""
    rows, first, count = (list(part) for part in zip(*entries, strict=True))
    writes = [blocks(s.row) for s in starts or ()]
    return runner.launch(StepPlan(0, rows, first, count, [True] * len(rows), starts or [], writes)).wait()


def generate(
    runner: DeviceRunner, prompt: list[int], count: int, params: SamplingParams = GREEDY, row: int = 0
) -> list[int]:
    """A prompt and `count` tokens, alone."""
    tokens = step(runner, [(row, 0, len(prompt))], [start(row, prompt, params)]).tokens
    while len(tokens) < count:
        tokens += step(runner, [(row, len(prompt) + len(tokens) - 1, 1)]).tokens
    return tokens
