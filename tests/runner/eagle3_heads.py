"""EAGLE-3 by its definition in plain torch (arXiv:2503.01840, §3), and heads as they are published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

VOCAB, HIDDEN, INNER, HEAD = 320, 64, 96, 16
EPS = 1e-6

# The layout of the method's authors and of SpecForge, and that of speculators with all it may ask for.
PUBLISHED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": VOCAB,
    "draft_vocab_size": 200,
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "draft_vocab_size": 150,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
    "target_hidden_size": HIDDEN,
    "dtype": "float32",
    "tie_word_embeddings": False,
    "transformer_layer_config": {
        **{key: value for key, value in PUBLISHED.items() if key not in ("architectures", "torch_dtype")},
        "model_type": "qwen3",
        "head_dim": HEAD,
        "attention_bias": False,
        "rope_theta": 5000.0,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
    },
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere"},
    },
}
del SPECULATORS["transformer_layer_config"]["draft_vocab_size"]


def layer_of(config: dict[str, Any]) -> dict[str, Any]:
    layer: dict[str, Any] = config.get("transformer_layer_config", config)
    return layer


def tensors(config: dict[str, Any], own_embedding: bool) -> dict[str, torch.Tensor]:
    """Random ones, under the names of the config's layout."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int = HIDDEN) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    layer, drafts = layer_of(config), config["draft_vocab_size"]
    first = "layers.0" if layer is not config else "midlayer"
    made = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": norm(),
        "lm_head.weight": 3 * matrix(drafts, HIDDEN),
    }
    for i in range(layer["num_hidden_layers"]):
        at, wide = (first, 2 * HIDDEN) if i == 0 else (f"layers.{i}", HIDDEN)
        made |= {
            f"{at}.input_layernorm.weight": norm(),
            f"{at}.post_attention_layernorm.weight": norm(),
            f"{at}.self_attn.q_proj.weight": 3 * matrix(4 * HEAD, wide),
            f"{at}.self_attn.k_proj.weight": 3 * matrix(2 * HEAD, wide),
            f"{at}.self_attn.v_proj.weight": matrix(2 * HEAD, wide),
            f"{at}.self_attn.o_proj.weight": matrix(HIDDEN, 4 * HEAD),
            f"{at}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
        if layer["model_type"] == "qwen3":
            made |= {f"{at}.self_attn.{part}_norm.weight": norm(HEAD) for part in "qk"}
    made[f"{first}.hidden_norm.weight"] = norm()
    if config.get("norm_before_fc"):
        made["input_norm.weight"] = norm(3 * HIDDEN)
    if own_embedding:
        made["embed_tokens.weight"] = matrix(VOCAB, HIDDEN)
    chosen = torch.randperm(VOCAB, generator=generator)[:drafts].sort().values
    made["d2t"] = chosen - torch.arange(drafts)
    made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, chosen, True)
    return made


def write(folder: Path, config: dict[str, Any], held: dict[str, torch.Tensor] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if held is not None:
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    return folder


class Definition:
    """The head of `config` with `held` tensors, beside a model with the embedding `embed` [V, H]."""

    def __init__(self, config: dict[str, Any], held: dict[str, torch.Tensor], embed: torch.Tensor) -> None:
        self._config, self._layer = config, layer_of(config)
        self._held = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in held.items()}
        self._embed = held.get("embed_tokens.weight", embed)

    def drafts(self, tokens: list[int], seen: torch.Tensor, count: int) -> list[int]:
        """The likeliest tokens behind `tokens`, seen [len(tokens) − 1, 3 H] what the model's layers hold at all but the
        last. Each draft is taken for granted by the next."""
        made = seen
        if self._config.get("norm_before_fc"):
            made = self._norm(made, "input_norm")
        hidden = made @ self._held["fc.weight"].T
        tokens = list(tokens)
        for _ in range(count):
            out = self._layers(self._embed[torch.tensor(tokens[1:])], hidden)
            best = int((self._norm(out[-1], "norm") @ self._held["lm_head.weight"].T).argmax())
            tokens.append(best + int(self._held["d2t"][best]))
            # What the head made of the last place stands where the model's own states end.
            hidden = torch.cat((hidden, out[-1:]))
        return tokens[-count:]

    def _layers(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden
        for i in range(self._layer["num_hidden_layers"]):
            at = f"layers.{i}"
            if i == 0:
                normed = self._norm(hidden, f"{at}.hidden_norm")
                inputs = torch.cat((self._norm(embedded, f"{at}.input_layernorm"), normed), dim=1)
                x = normed if self._config.get("norm_before_residual") else hidden
            else:
                inputs = self._norm(x, f"{at}.input_layernorm")
            x = x + self._attend(inputs, f"{at}.self_attn")
            y = self._norm(x, f"{at}.post_attention_layernorm")
            gate, up = (y @ self._held[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (F.silu(gate) * up) @ self._held[f"{at}.mlp.down_proj.weight"].T
        return x

    def _attend(self, x: torch.Tensor, name: str) -> torch.Tensor:
        q, k, v = ((x @ self._held[f"{name}.{part}_proj.weight"].T).unflatten(1, (-1, HEAD)) for part in "qkv")
        if f"{name}.q_norm.weight" in self._held:
            q, k = self._norm(q, f"{name}.q_norm"), self._norm(k, f"{name}.k_norm")
        q, k = self._turn(q), self._turn(k)
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD**-0.5
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)
        return mixed.flatten(1) @ self._held[f"{name}.o_proj.weight"].T

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        half = HEAD // 2
        frequencies = self._layer.get("rope_theta", 10000.0) ** (-torch.arange(half) / half)
        angles = torch.arange(len(x))[:, None, None] * frequencies
        one, two = x[..., :half], x[..., half:]
        return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), dim=-1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self._held[f"{name}.weight"]
