"""deterministic: a request's tokens and log-probabilities have the same bits alone, in a batch and in any chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.types import RequestInput, SamplingParams
from tests.gate.families import FAMILIES
from tests.gate.packings import PACKINGS
from tests.gate.shapes import VOCAB, Shape
from tests.runner.test_graphs import TINY
from tests.runner.test_graphs import checkpoint as checkpoint

EXPERTS = {
    **TINY,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# One of each kind of weight and of inputs; blocks of GGUF files are no config's, and are held as kernels.
KINDS = (
    "fp8-blocks-f32", "ct-fp8-rows", "ct-w8a8", "ct-int4-g32", "ct-int8-channel", "ct-mxfp4", "ct-nvfp4-inputs",
)  # fmt: skip


def run(
    checkpoint: Path, prompts: list[list[int]], together: bool, chunk: int = 0, trims: bool = True, size: int = 16
) -> list[tuple[object, ...]]:
    """Tokens and log-probabilities of each prompt; twice the first, so that one of them finds its prefix cached."""
    config = EngineConfig(
        model=str(checkpoint),
        load_format="dummy",
        max_model_len=256,
        scheduler=SchedulerConfig(max_rows=8, token_budget=256, chunk_size=chunk),
        cache=CacheConfig(num_blocks=120, block_size=size),
        runtime=RuntimeConfig(device="cpu", deterministic=True, trim_last_layer=trims),
    )
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=3, ignore_eos=True)
    inputs = [RequestInput(request_id=str(i), prompt_ids=p, params=params) for i, p in enumerate(prompts)]
    engine = Engine.from_config(config).start()
    try:
        found = engine.generate(inputs) if together else [engine.generate([one])[0] for one in inputs]
    finally:
        engine.close()
    return [(g.token_ids, [(p.ids, p.logprobs) for p in g.logprobs]) for g in found]


def test_neither_batch_nor_chunks_nor_prefix_change_a_bit(checkpoint: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in (40, 7, 65, 33)]
    alone = run(checkpoint, [*prompts, prompts[0]], together=False)
    assert alone[4] == alone[0]
    assert run(checkpoint, [*prompts, prompts[0]], together=True) == alone
    assert run(checkpoint, [*prompts, prompts[0]], together=True, chunk=5) == alone


# Each keeps something of its own: windows of keys, latents, states, compressed entries, sinks.
PLAYED = ("gemma3", "deepseek-v2", "qwen3.5", "deepseek-v4", "gpt-oss")


@pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=shape.name, marks=() if shape.name in PLAYED else pytest.mark.slow) for shape in FAMILIES],
)
def test_every_family_keeps_it(shape: Shape, tmp_path: Path) -> None:
    """Dummy weights, sizes and layers of the gate; prompts longer than a window of compression, and than one chunk."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{shape.kind}Config")(**shape.config)
    config.architectures = [f"{shape.kind.removesuffix('Text')}ForCausalLM"]
    config.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (40, 7, 65)]
    size = shape.block_size
    alone = run(tmp_path, prompts, together=False, size=size)
    assert run(tmp_path, [*prompts, prompts[0]], together=True, size=size)[:3] == alone
    assert run(tmp_path, prompts, together=True, chunk=5, trims=False, size=size) == alone


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(shape, kind, id=f"{kind}-{name}", marks=pytest.mark.slow if name == "experts" and i % 3 else ())
        for i, kind in enumerate(KINDS)
        for name, shape in (("dense", TINY), ("experts", EXPERTS))
    ],
)
def test_every_kind_of_weight_keeps_it(kind: str, shape: dict[str, object], tmp_path: Path) -> None:
    said = next(packing.config for packing in PACKINGS if packing.name == kind)
    (tmp_path / "config.json").write_text(json.dumps({**shape, "quantization_config": said}))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 320, (n,), generator=generator).tolist() for n in (40, 7)]
    alone = run(tmp_path, prompts, together=False)
    assert run(tmp_path, [*prompts, prompts[0]], together=True, chunk=5)[:2] == alone
