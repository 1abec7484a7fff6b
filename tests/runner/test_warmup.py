"""What the runner compiles before it is ready is all that its steps can need, of any shape and with any extras."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from engine.runner.inputs import MULTI_TOKEN_ENTRIES
from engine.runner.warmup import LOGPROBS, logprobs_bucket, warmup_steps
from kernels.compilation.watch import CompileWatch
from kernels.linear.gguf_dispatch import DISPATCH, GgufProblem
from kernels.linear.gguf_vector import EACH, MAX_ROWS
from kernels.linear.invariant import many_rows_tile
from kernels.moe_gemm.dispatch import DISPATCH as DENSE_EXPERTS
from kernels.moe_gemm.dispatch import Problem
from kernels.moe_gemm.quantized_dispatch import DISPATCH as QUANTIZED_EXPERTS
from kernels.moe_gemm.quantized_dispatch import QuantizedProblem
from kernels.sizes import next_power_of_2
from perf.shapes import QUANTIZATIONS
from tests.compiled import environment
from tests.runner.test_graphs import TINY

# Heads of Qwen3-30B-A3B: which kernel decode entries take depends on them.
DENSE = {**TINY, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 4}


# Routing counts of DeepSeek-V2-Lite: what is compiled depends on the pairs of token and expert.
LATENT_EXPERTS = {
    **TINY,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 256,
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 128,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
}
# Tiles of their products depend on pairs of an expert, and those of few pairs on how many programs there are.
PACKED_EXPERTS = {
    **LATENT_EXPERTS,
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "quantization_config": QUANTIZATIONS["w4a16"],
}


# Left to `make test-slow`: what drafts, ranks, other weights and packed experts show as well.
@pytest.mark.parametrize(
    ("config", "steps", "mode"),
    [
        pytest.param(DENSE, 100, (), marks=pytest.mark.slow),
        pytest.param(LATENT_EXPERTS, 100, (), marks=pytest.mark.slow),
        pytest.param(DENSE, 30, ("deterministic",), marks=pytest.mark.slow),
        ({**DENSE, "quantization_config": QUANTIZATIONS["fp8"]}, 20, ("deterministic",)),
        ({**DENSE, "quantization_config": QUANTIZATIONS["fp8"]}, 60, ()),
        (PACKED_EXPERTS, 25, ()),
        (DENSE, 60, ("drafts",)),
        (DENSE, 60, ("ranks", "budgets")),
    ],
    ids=[
        "dense",
        "latents and experts",
        "dense, deterministic",
        "fp8, deterministic",
        "fp8",
        "packed experts",
        "dense, drafts",
        "dense, ranks and whole budgets",
    ],
)
def test_random_steps_need_no_kernel_that_the_warmup_did_not(
    tmp_path: Path, config: dict[str, Any], steps: int, mode: tuple[str, ...]
) -> None:
    config = {**config, "torch_dtype": "bfloat16", "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "tests.runner.variants", str(tmp_path), str(steps), "3", *mode]
    # Zeros of any size come from fresh pages, which the system zeroes when they are touched: these never are.
    fresh = {**environment(tmp_path), "MALLOC_MMAP_THRESHOLD_": "100000"}
    done = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert sum(found["ahead"].values()) > 20
    assert found["graphs"] > 20
    late = Counter(f"{name}, first in {what}" for name, _, what in found["late"])
    assert not late, f"steps need kernels that the warm-up did not compile: {dict(late)}"


def test_warmup_steps_stay_within_the_limits_of_the_engine() -> None:
    for rows, budget, context in ((1, 16, 16), (4, 64, 33), (256, 8192, 20480)):
        steps = warmup_steps(rows, budget, context)
        assert steps
        for step in steps:
            assert 1 <= step.singles + step.longer <= rows + MULTI_TOKEN_ENTRIES
            assert step.tokens <= budget
            assert step.first + max(step.count, 1) <= context


def test_a_warmup_step_has_as_many_tokens_as_a_step_may_have() -> None:
    """Of 384 experts, 8 a token, products take other kernels from 6,145 tokens on."""
    for budget, context in ((8192, 20480), (8192, 4096), (64, 33)):
        assert max(step.tokens for step in warmup_steps(256, budget, context)) > budget - 4


@given(
    rows=st.integers(129, 1 << 15),
    n=st.integers(1, 20000),
    k=st.sampled_from([512, 4096, 14336]),
    context=st.sampled_from([1000, 8192]),
)
def test_a_batch_invariant_product_of_any_number_of_rows_has_a_tile_of_a_warmup_step(
    rows: int, n: int, k: int, context: int
) -> None:
    met = {many_rows_tile(step.tokens, n, k, 132) for step in warmup_steps(256, 8192, context) if step.tokens > 128}
    assert many_rows_tile(rows, n, k, 132) in met


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_blocks_of_files_take_any_number_of_rows_by_a_kernel_of_a_warmup_step(gated: bool, stream: bool) -> None:
    """Of entries of one token each, whose rows the head takes too."""

    def kernel(rows: int) -> tuple[Any, ...]:
        taken = (rows <= MAX_ROWS, stream and 4 <= rows <= 64, True)
        choice = DISPATCH.choose(GgufProblem(rows, (28672,), 4096, gated, False, "h200", *taken))
        return choice.name, choice.config, min(EACH, next_power_of_2(rows)) if choice.name == "vector" else 0

    met = {kernel(step.tokens) for step in warmup_steps(256, 8192, 8192) if step.singles == step.tokens}
    assert met >= {kernel(rows) for rows in range(1, 257)}


# Experts, and how many a token takes: Qwen3-30B-A3B, DeepSeek-V2-Lite, V2, V3 (and shared experts in the table),
# V4-Flash, Kimi-K2, Qwen3.5, gpt-oss-20b, Qwen1.5-MoE, Mixtral.
@pytest.mark.parametrize(
    ("experts", "each"),
    [(128, 8), (64, 6), (66, 8), (160, 6), (256, 8), (257, 9), (256, 6), (384, 8), (512, 10), (32, 4), (60, 4), (8, 2)],
)
def test_experts_of_any_number_of_tokens_have_a_kernel_of_a_warmup_step(experts: int, each: int) -> None:
    def kernels(tokens: int) -> Iterator[tuple[str, Any]]:
        pairs = tokens * each
        for kind in ("fp4", "packed", "fp8", "int8"):
            problem = QuantizedProblem(kind, pairs, experts, torch.bfloat16, False, True, True, "h200", True, True)
            for asked in (problem, problem._replace(ring=False, groups=False, alone=False)):
                choice = QUANTIZED_EXPERTS.choose(asked)
                yield choice.name, choice.config
        for groups in (True, False):
            dense = Problem(tokens, pairs, experts, 768, torch.bfloat16, True, False, groups, True, "h200")
            choice = DENSE_EXPERTS.choose(dense)
            yield choice.name, choice.config

    met = {kernel for step in warmup_steps(256, 8192, 20480) for kernel in kernels(step.tokens)}
    tokens = (*range(1, 64), *range(64, 8193, 5))
    missed = {kernel: n for n in tokens for kernel in kernels(n) if kernel not in met}
    assert not missed


def test_every_number_of_logprobs_has_a_kernel_that_the_warmup_compiles() -> None:
    for count in range(LOGPROBS[-1] + 1):
        assert count <= logprobs_bucket(count) in LOGPROBS


def _compilation(name: str, cached: bool = False) -> dict[str, Any]:
    return {"src": SimpleNamespace(name=name), "times": SimpleNamespace(total=2e5), "cache_hit": cached, "metadata": {}}


def test_kernels_that_come_after_the_engine_is_ready_are_counted_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = CompileWatch()
    watch._heard(**_compilation("early"))
    assert watch.count == 0
    watch.arm()
    with caplog.at_level(logging.WARNING):
        watch._heard(**_compilation("attend"))
        watch._heard(**_compilation("attend"))
        watch._heard(**_compilation("sample", cached=True))
    assert watch.late == Counter(attend=2, sample=1)
    assert watch.count == 3
    assert [record.getMessage().split()[1:4] for record in caplog.records] == [
        ["attend", "was", "compiled"],
        ["sample", "was", "loaded"],
    ]
