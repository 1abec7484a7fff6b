"""A model and heads of EAGLE-3 that draft for it, with random weights, whose drafts stand with chosen probabilities.

    python -m perf.draft_pairs FOLDER qwen3-8b [--acceptance 0.75 0] [--drafts 32000]

Writes FOLDER/qwen3-8b and a head for each probability, FOLDER/qwen3-8b-head-0.75: files of the full size, in the
published layout. Every layer is computed, and adds next to nothing to a residual stream that is the same for all
tokens. So each position draws from one distribution over `LIKELY` tokens, at temperature 1. The head draws with the
same noise from logits that differ from them by as much as makes both draw the same token with probability
`--acceptance`. 0: no draft ever stands.

The steps are those of trained weights. The acceptance is synthetic: it is what a server makes of drafts that is
measured, and not a head.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from perf import checkpoints, shapes
from perf.checkpoints import Stored, Tensors

# Tokens that are drawn, and how far their logits lie above all others'.
LIKELY, ABOVE = 2000, 12.0
# Of the residual stream: what layers add vanishes beside it.
STREAM = 4096.0
ROWS = 8192  # of a head that are made at a time


def write(folder: Path, shape: str, acceptances: Sequence[float], drafts: int = 32000) -> list[Path]:
    """The folders of the model and of a head for each of `acceptances`; `drafts` is how many tokens a head can draft.

    Raises ValueError for a shape whose head is its embedding, and for a probability or number that cannot be.
    """
    config = shapes.config_of(shape.partition(":")[0])
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    if config["tie_word_embeddings"]:
        raise ValueError(f"{shape} has no head of its own, which this needs: take qwen3-8b")
    likely = min(LIKELY, vocab // 4)
    if not all(0 <= acceptance <= 1 for acceptance in acceptances) or not 2 * likely <= drafts <= vocab:
        raise ValueError(f"--acceptance is 0 to 1, and --drafts {2 * likely} to {vocab} for {shape}")
    draw = torch.Generator().manual_seed(1)
    stream = (torch.randn(hidden, generator=draw) * STREAM).bfloat16()
    tokens = torch.randperm(vocab, generator=draw)[:drafts].sort().values
    drawn = tokens[torch.randperm(drafts, generator=draw)]
    theirs = torch.randn(vocab, generator=draw)
    theirs[drawn[:likely]] += ABOVE
    noise = torch.randn(vocab, generator=draw)
    model = checkpoints.write(
        folder,
        shape,
        vocab=vocab,
        layers=config["num_hidden_layers"],
        values={
            "model.embed_tokens.weight": stream.expand(vocab, hidden),
            "model.norm.weight": torch.ones(hidden),
            "lm_head.weight": _head(theirs, stream.float()),
        },
    )
    made = [model]
    for acceptance in acceptances:
        if acceptance:
            ours = theirs + _spread(theirs[drawn[:likely]], noise[drawn[:likely]], acceptance) * noise
        else:
            ours = noise.clone()
            ours[drawn[likely : 2 * likely]] += ABOVE
        head = model.with_name(f"{model.name}-head-{acceptance:g}")
        head.mkdir(exist_ok=True)
        (head / "config.json").write_text(json.dumps(_head_config(config, drafts)))
        checkpoints.write_safetensors(head, _head_tensors(config, stream, ours[tokens], tokens))
        made.append(head)
    return made


def agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    """How likely softmax draws from two rows of logits [V] with the same Gumbel noise are the same token.

    Token i is drawn of both with probability 1 / Σ_j max(p_j / p_i, q_j / q_i) (Daliri, Musco and Suresh 2024,
    arXiv:2408.07978).
    """
    ratios = torch.maximum(first[None] - first[:, None], second[None] - second[:, None]).double().exp()
    return float((1 / ratios.sum(dim=1)).sum())


def _spread(logits: torch.Tensor, noise: torch.Tensor, acceptance: float) -> float:
    """How much noise makes draws agree with that probability."""
    low, high = 0.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if agreement(logits, logits + middle * noise) > acceptance else (low, middle)
    return low


def _head(logits: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """Random rows [V, hidden] that give these logits for the normed stream."""
    normed = stream / stream.square().mean().sqrt()
    made = torch.empty(len(logits), len(stream), dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(2)
    for start in range(0, len(logits), ROWS):
        wanted = logits[start : start + ROWS]
        rows = torch.randn(len(wanted), len(stream), generator=draw) * 0.02
        rows += torch.outer(wanted - rows @ normed, normed / normed.square().sum())
        made[start : start + ROWS] = rows
    return made


def _head_config(config: dict[str, object], drafts: int) -> dict[str, object]:
    kept: tuple[str, ...]
    kept = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    kept += ("max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act", "torch_dtype")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": drafts,
        "tie_word_embeddings": False,
        **{key: config[key] for key in kept},
    }


def _head_tensors(config: dict[str, int], stream: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> Tensors:
    hidden, width, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    fc = torch.randn(hidden, 3 * hidden, generator=torch.Generator().manual_seed(3)) * 0.001
    fc[:, :hidden] += torch.eye(hidden)
    fc = fc.bfloat16()
    seen = fc.float() @ stream.float().repeat(3)
    plain = {
        "self_attn.q_proj": (heads, 2 * hidden),
        "self_attn.k_proj": (groups, 2 * hidden),
        "self_attn.v_proj": (groups, 2 * hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (width, hidden),
        "mlp.up_proj": (width, hidden),
        "mlp.down_proj": (hidden, width),
        "input_layernorm": (hidden,),
        "hidden_norm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    made = {f"midlayer.{name}.weight": Stored(torch.bfloat16, size) for name, size in plain.items()}
    given = {"fc.weight": fc, "norm.weight": torch.ones(hidden), "lm_head.weight": _head(logits, seen)}
    made |= {name: Stored(torch.bfloat16, tuple(value.shape), value) for name, value in given.items()}
    return {**made, "d2t": Stored(torch.int64, tuple(tokens.shape), tokens - torch.arange(len(tokens)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", help="SHAPE or SHAPE:QUANTIZATION, as perf.checkpoints takes it")
    parser.add_argument(
        "--acceptance", type=float, nargs="+", default=[0.75], help="how likely a draft of a head stands"
    )
    parser.add_argument("--drafts", type=int, default=32000, help="tokens that the head can draft")
    args = parser.parse_args()
    try:
        print(*write(args.folder, args.shape, args.acceptance, args.drafts))
    except ValueError as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
