"""The gate of GGUF files: every format, and files that mix them, in float32 against transformers' model of the numbers
that the gguf package reads them as; and that the gate would see a file that is misread."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig
from engine.quant.formats.gguf import LatentUp
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from engine.serving.launch import gguf_folder
from engine.weights import gguf as weights
from kernels.weight import GgufBlocks
from kernels.weight import gguf as blocks
from tests import gguf_files
from tests.gate import test_ranks
from tests.gate.families import YARN
from tests.gate.oracle import FORCED, Golden, Sequence, golden
from tests.gate.player import EnginePlayer
from tests.gate.shapes import COMMON, Shape
from tests.gate.verdict import Verdict, judge

SMALL = {**COMMON, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = Shape(
    "gguf-llama",
    "Llama",
    {**SMALL, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    long_prompt=300,
    sequences=8,
)
QWEN3 = Shape(
    "gguf-qwen3",
    "Qwen3",
    {
        **SMALL,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    long_prompt=300,
    sequences=8,
)
GEMMA3 = Shape(
    "gguf-gemma3",
    "Gemma3Text",
    {
        **SMALL,
        "num_hidden_layers": 7,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 100,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
    long_prompt=300,
    sequences=8,
)
QWEN3_MOE = Shape(
    "gguf-qwen3-moe",
    "Qwen3Moe",
    {
        **SMALL,
        "head_dim": 128,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
    long_prompt=300,
    sequences=8,
)
LATENT = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
DEEPSEEK_V2 = Shape(
    "gguf-deepseek-v2",
    "DeepseekV2",
    {
        **LATENT,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "rope_parameters": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    long_prompt=300,
    sequences=8,
    branch=0.2,
    router=1.0,
)
DEEPSEEK_V3 = Shape(
    "gguf-deepseek-v3",
    "DeepseekV3",
    {
        **LATENT,
        "q_lora_rank": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "beta_fast": 1.0, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    long_prompt=300,
    sequences=8,
    branch=0.2,
    router=1.0,
)
# By a word in a tensor's name, as files of these kinds have them.
Q4_K_M = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed": "Q4_K", "lm_head": "Q6_K", "": "Q4_K"}
ODD = {"k_proj": "F16", "v_proj": "Q5_K", "up_proj": "Q3_K", "embed": "Q8_0", "lm_head": "BF16", "": "Q2_K"}
FOURS = {"q_proj": "IQ4_NL", "gate_proj": "IQ4_XS", "embed": "Q4_0", "": "IQ4_XS"}
CASES: list[tuple[Shape, str, Mapping[str, str]]] = [
    (LLAMA, "f32", {"": "F32"}),
    (LLAMA, "q8_0", {"": "Q8_0"}),
    (LLAMA, "q4_k_m", Q4_K_M),
    (LLAMA, "odd", ODD),
    (QWEN3, "bf16", {"": "BF16"}),
    (QWEN3, "q4_0", {"embed": "F16", "": "Q4_0"}),
    (QWEN3, "q4_k_m", {**Q4_K_M, "embed": "Q6_K"}),
    (QWEN3, "fours", FOURS),
    (GEMMA3, "q4_k_m", {"embed": "Q8_0", "v_proj": "Q8_0", "down_proj": "Q6_K", "": "Q5_0"}),
    (GEMMA3, "f16", {"": "F16"}),
    (QWEN3_MOE, "q4_k_m", Q4_K_M),
    (QWEN3_MOE, "odd", ODD),
    (QWEN3_MOE, "half", {"gate_proj": "F16", "": "Q8_0"}),
    (DEEPSEEK_V2, "half", {"shared_experts.up": "F16", "down_proj": "BF16", "": "Q8_0"}),
    (DEEPSEEK_V2, "q4_k_m", {"k_b": "Q5_0", **Q4_K_M}),
    (DEEPSEEK_V2, "q5_1", {"": "Q5_1"}),
    (DEEPSEEK_V2, "undivided", {"": "Q8_0"}),
    (DEEPSEEK_V3, "q3_k", {"k_b": "Q4_1", "v_b": "F16", "up_proj": "Q4_K", "shared": "Q5_K", "": "Q3_K"}),
    (DEEPSEEK_V3, "bf16", {"": "BF16"}),
]


def truth_of(shape: Shape, name: str, formats: Mapping[str, str], root: Path) -> Golden:
    """A folder for a GGUF file, and what transformers says of its numbers. Made once and kept, as `golden` is."""
    cache = root / ".cache" / "gate"
    base = golden(shape, cache)
    code = b"".join(Path(str(module.__file__)).read_bytes() for module in (gguf_files, gguf_folder))
    source = json.dumps([shape.config, dict(formats)], sort_keys=True).encode() + code + Path(__file__).read_bytes()
    folder = cache / f"{shape.name}-{name}-{hashlib.sha256(source).hexdigest()[:12]}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _make(base, formats, Path(made), divided=name != "undivided")
            Path(made).rename(folder)
    served = folder / "served"
    if not served.exists():
        served.mkdir()
        gguf_folder.write(folder / "m.gguf", served)
    with np.load(folder / "logprobs.npz") as file:
        kept = [
            Sequence(sequence.prompt, sequence.forced, {"float32": file[str(i)]})
            for i, sequence in enumerate(base.sequences)
        ]
    return Golden(served, kept, kept[-1])


def _make(base: Golden, formats: Mapping[str, str], folder: Path, divided: bool) -> None:
    """divided: the up-projection of latents stands in two tensors, as files have it since caches hold latents."""
    import transformers

    config = gguf_files.plain_config(base.folder)
    tensors = load_file(base.folder / "model.safetensors")
    written = gguf_files.write(
        folder / "m.gguf",
        {**config, "split_latent": divided},
        tensors,
        lambda name: next(kind for word, kind in formats.items() if word in name),
    )
    with tempfile.TemporaryDirectory() as plain:
        save_file(written.numbers, Path(plain) / "model.safetensors", metadata={"format": "pt"})
        (Path(plain) / "config.json").write_text(json.dumps(config))
        architecture = getattr(transformers, config["architectures"][0])
        model = architecture.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs = {}
    for i, sequence in enumerate(base.sequences):
        with torch.inference_mode():
            logits = model(torch.tensor([[*sequence.prompt, *sequence.forced]]), logits_to_keep=FORCED + 1).logits[0]
        logprobs[str(i)] = logits.log_softmax(-1).numpy()
    np.savez_compressed(folder / "logprobs.npz", **logprobs)


def play(truth: Golden) -> Verdict:
    config = EngineConfig(
        model=str(truth.folder),
        max_model_len=320,
        scheduler=SchedulerConfig(max_rows=12, token_budget=1024),
        cache=CacheConfig(block_size=16, num_blocks=256),
        runtime=RuntimeConfig(dtype="float32"),
    )
    engine = Engine(build_runner(config), config).start()
    try:
        return judge(truth.sequences, EnginePlayer(engine).play(truth.sequences), "float32")
    finally:
        engine.close()


@pytest.mark.parametrize(("shape", "name", "formats"), CASES, ids=[f"{s.name}-{name}" for s, name, _ in CASES])
def test_a_file_is_the_numbers_that_it_stands_for(
    shape: Shape, name: str, formats: Mapping[str, str], pytestconfig: pytest.Config
) -> None:
    verdict = play(truth_of(shape, name, formats, Path(pytestconfig.rootpath)))
    assert verdict.passes("float32"), verdict


BY_NAME = {f"{shape.name}-{name}": (shape, name, formats) for shape, name, formats in CASES}
# Files that two ranks share, and how; of these `make test` plays some.
QUICK = ("gguf-llama-q8_0", "gguf-qwen3-q4_k_m", "gguf-qwen3-moe-q4_k_m", "gguf-deepseek-v2-undivided")
RANKS: list[tuple[str, dict[str, Any]]] = [
    ("gguf-llama-q8_0", {}),
    ("gguf-qwen3-q4_k_m", {}),
    ("gguf-gemma3-q4_k_m", {}),
    ("gguf-qwen3-moe-q4_k_m", {}),  # an expert's channels are one block, so experts are whole
    ("gguf-qwen3-moe-half", {}),
    ("gguf-deepseek-v2-half", {}),
    ("gguf-deepseek-v2-q5_1", {"context": "sliced"}),
    ("gguf-deepseek-v2-undivided", {"expert": "whole"}),
    ("gguf-deepseek-v3-bf16", {}),
]


SHARED = [
    pytest.param(
        name,
        way,
        id=" ".join([name, *way.values()]),
        marks=[] if name in QUICK else [pytest.mark.slow],
    )
    for name, way in RANKS
]


@pytest.mark.parametrize(("file", "parallel"), SHARED)
def test_two_ranks_share_a_file(file: str, parallel: dict[str, Any], pytestconfig: pytest.Config) -> None:
    shape, *stored = BY_NAME[file]
    truth = truth_of(shape, *stored, Path(pytestconfig.rootpath))
    sizes: dict[int, int] = {}

    def weigh(runner: DeviceRunner, rank: int) -> None:
        sizes[rank] = runner.decoder.num_bytes

    for played in test_ranks.play(test_ranks.of_ranks(truth, shape, 2, **parallel), truth, weigh):
        verdict = judge(truth.sequences, played, "float32")
        assert verdict.passes("float32"), verdict
    whole = build_runner(test_ranks.of_ranks(truth, shape, 1)).decoder.num_bytes
    assert all(size < 0.7 * whole for size in sizes.values())
    assert len(sizes) == 2


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        (
            "gguf-llama-q4_k_m",
            r"o_proj\.weight has one block of Q4_K for 256 of 256 inputs, and of these one of 2 ranks",
        ),
        ("gguf-qwen3-moe-odd", "256 channels is stored in runs of 256, too few of them: parallel.expert auto or whole"),
    ],
)
def test_a_block_is_not_parted(file: str, sentence: str, pytestconfig: pytest.Config) -> None:
    shape, *stored = BY_NAME[file]
    truth = truth_of(shape, *stored, Path(pytestconfig.rootpath))
    with pytest.raises(ValueError, match=sentence):
        test_ranks.play(test_ranks.of_ranks(truth, shape, 2, expert="sliced"), truth)


def unpaired(*given: Any, made: Any = weights._named) -> Any:
    return [replace(entry, paired=0) for entry in made(*given)]


def turned(self: GgufBlocks, *given: Any, product: Any = GgufBlocks.product) -> torch.Tensor:
    formats = self.formats[::-1] if len(self.formats) == 1 else self.formats
    same = GgufBlocks(tuple(part.roll(1, -2) for part in self.parts), formats, self.inputs)
    made: torch.Tensor = product(same, *given)
    return made


def level(*given: Any, made: Any = weights._named) -> Any:
    return [replace(entry, offset=0.0) for entry in made(*given)]


def reversed_experts(*given: Any, made: Any = weights._named) -> Any:
    found = list(made(*given))
    return [replace(entry, start=other.start) for entry, other in zip(found, found[::-1], strict=True)]


def swapped(data: torch.Tensor, run: int) -> torch.Tensor:
    runs = data.unflatten(1, (-1, run))
    return torch.stack((runs >> 4, runs & 15), dim=2)


def without_minima(b: torch.Tensor, made: Any = blocks._scales_and_mins) -> Any:
    scales, minima = made(b)
    return scales, 0 * minima


def one_less(data: torch.Tensor) -> torch.Tensor:
    return (blocks._nibbles(data[:, 2:], 16).flatten(1).float() - 7) * blocks._halves(data, 0)


def unturned(self: LatentUp, tensors: Any, view: Any) -> torch.Tensor:
    keys, values = (blocks.dequantize(tensor, name) for tensor, name in zip(tensors, ("Q8_0",) * 2, strict=True))
    return torch.cat((keys.reshape(len(keys), -1, values.shape[2]), values), dim=1).reshape(view)


Q4_0 = blocks.FORMATS["Q4_0"]
# What is misread, in which file: shape, name and formats, and what stands in its place.
BROKEN: dict[str, tuple[Shape, str, Mapping[str, str], tuple[object, str, object]]] = {
    "rows of queries and keys left in pairs": (LLAMA, "q8_0", {"": "Q8_0"}, (weights, "_named", unpaired)),
    "rows of a part one off": (LLAMA, "q8_0", {"": "Q8_0"}, (GgufBlocks, "product", turned)),
    "nibbles swapped": (LLAMA, "q4_k_m", Q4_K_M, (blocks, "_nibbles", swapped)),
    "minima of groups left out": (LLAMA, "q4_k_m", Q4_K_M, (blocks, "_scales_and_mins", without_minima)),
    "zero one off": (
        QWEN3,
        "q4_0",
        {"embed": "F16", "": "Q4_0"},
        (blocks, "FORMATS", {**blocks.FORMATS, "Q4_0": replace(Q4_0, numbers=one_less)}),
    ),
    "norms with their offset twice": (GEMMA3, "f16", {"": "F16"}, (weights, "_named", level)),
    "experts in another order": (QWEN3_MOE, "q4_k_m", Q4_K_M, (weights, "_named", reversed_experts)),
    "keys of latents not turned": (DEEPSEEK_V2, "q8_0", {"": "Q8_0"}, (LatentUp, "__call__", unturned)),
}


@pytest.mark.parametrize(("shape", "name", "formats", "change"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_misread_fails(
    shape: Shape,
    name: str,
    formats: Mapping[str, str],
    change: tuple[object, str, object],
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = truth_of(shape, name, formats, Path(pytestconfig.rootpath))
    monkeypatch.setattr(*change)
    assert not play(truth).passes("float32")


@pytest.mark.parametrize("shape", [LLAMA, GEMMA3, DEEPSEEK_V2], ids=lambda shape: shape.name)
def test_a_file_without_its_rope_scaling_fails(shape: Shape, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    formats = {"": "F16"} if shape is GEMMA3 else {"": "Q8_0"}
    truth = truth_of(shape, "f16" if shape is GEMMA3 else "q8_0", formats, Path(pytestconfig.rootpath))
    folder = tmp_path / "changed"
    shutil.copytree(truth.folder, folder, symlinks=True)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_scaling"]
    (folder / "config.json").write_text(json.dumps(config))
    assert not play(replace(truth, folder=folder)).passes("float32")
