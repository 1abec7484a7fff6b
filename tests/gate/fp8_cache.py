"""What transformers says with a cache of 8-bit floats: its own cache, rounded as it is filled.

transformers has no such cache, so the definition is here: what a cache keeps is the nearest e4m3 number of a key (after
its rotation), a value or a latent over the layer's scale, and what is read is that number times the scale.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.gate.oracle import FORCED, SEED, Sequence, random_model
from tests.gate.shapes import VOCAB, Shape

LENGTHS = (1, 15, 16, 33, 64, 121)
LARGEST = 448.0
# Of keys and values, by layer: no powers of two, so that numbers over a wrong scale are others. The first layer's
# values are beyond the largest number.
SCALES = ((0.013, 0.0031), (0.021, 0.0093), (0.017, 0.0057), (0.011, 0.0071))


@dataclass(frozen=True)
class Fp8Cache:
    """A checkpoint folder that says its cache is quantized, what its model says then, and where it is played."""

    folder: Path
    sequences: list[Sequence]
    device: str


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return (x / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _round(scale: float, _module: Any, _given: Any, made: torch.Tensor) -> torch.Tensor:
    return rounded(made, scale)


def with_rounded_cache(model: Any, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), VOCAB] of one pass whose keys and values, or latents, went through the cache."""
    from transformers import DynamicCache

    class Rounded(DynamicCache):
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **more: Any
        ) -> Any:
            k, v = SCALES[layer_idx % len(SCALES)]
            return super().update(rounded(key_states, k), rounded(value_states, v), layer_idx, *rest, **more)

    latents = [module for name, module in model.named_modules() if name.endswith("kv_a_layernorm")]
    hooks = [
        module.register_forward_hook(partial(_round, SCALES[layer % len(SCALES)][0]))
        for layer, module in enumerate(latents)
    ]
    kind = DynamicCache if latents else Rounded
    try:
        with torch.inference_mode():
            logits: torch.Tensor = model(
                torch.tensor([tokens]), past_key_values=kind(config=model.config), use_cache=True
            ).logits[0]
        return logits
    finally:
        for hook in hooks:
            hook.remove()


def golden(shape: Shape, cache: Path, device: str) -> Fp8Cache:
    """The checkpoint of a shape with scales in compressed-tensors' spelling, and what it says of a few sequences: from
    `cache` or made now, as `tests.gate.oracle.golden` does it."""
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode() + Path(__file__).read_bytes())
    folder = cache / f"eight-{shape.name}-{digest.hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"eight-{shape.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as made:
                _make(shape, Path(made))
                Path(made).rename(folder)
    with np.load(folder / "golden.npz") as file:
        sequences = [
            Sequence(file[f"{i}.prompt"].tolist(), file[f"{i}.forced"].tolist(), {"float32": file[f"{i}.logprobs"]})
            for i in range(len(LENGTHS))
        ]
    return Fp8Cache(folder, sequences, device)


def _make(shape: Shape, folder: Path) -> None:
    model = random_model(shape)
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(model.config.num_hidden_layers):
        k, v = SCALES[layer % len(SCALES)]
        name = f"model.layers.{layer}.self_attn"
        tensors |= {f"{name}.k_scale": torch.tensor([k]), f"{name}.v_scale": torch.tensor([v])}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    (folder / "config.json").write_text(json.dumps(config))
    generator = np.random.default_rng(SEED)
    kept = {}
    for i, length in enumerate(LENGTHS):
        prompt, forced = (generator.integers(0, VOCAB, count).tolist() for count in (length, FORCED))
        logits = with_rounded_cache(model, [*prompt, *forced])[-FORCED - 1 :]
        kept |= {f"{i}.prompt": np.array(prompt), f"{i}.forced": np.array(forced)}
        kept[f"{i}.logprobs"] = logits.log_softmax(-1).numpy()
    np.savez_compressed(folder / "golden.npz", **kept)
