"""Trains the demo checkpoint and its draft on text that ships with Python.

    python -m engine.demo.train OUT

Needs transformers and, for a useful result, a GPU. Writes OUT/demo and OUT/demo-draft in Hugging Face layout
(bfloat16) and OUT/training.json with corpus sizes, steps, held-out loss and versions. The two share one tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.demo.corpus import END, Document, split
from engine.demo.make import CHAT_TEMPLATE, SPECIAL

VOCAB, CONTEXT, BATCH = 4096, 512, 128
REPEATS = {"source": 1, "prose": 1, "chat": 2}


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths of one model. All are Qwen3-shaped: qk-norm, grouped queries, tied embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    peak_rate: float
    steps: int


SHAPES = {
    "demo": Shape(256, 6, 4, 2, 64, 576, 3e-3, 700),
    "demo-draft": Shape(128, 2, 2, 1, 64, 256, 5e-3, 2500),
}


def train_tokenizer(texts: list[Document]) -> Tokenizer:
    """Byte-level BPE of VOCAB entries, the three special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((d.text for d in texts), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[Document]) -> torch.Tensor:
    """One stream of tokens, [N] int64, an end-of-text after every document."""
    repeated = [d.text for d in texts for _ in range(REPEATS[d.kind])]
    end = tokenizer.token_to_id(END)
    ids = [i for e in tokenizer.encode_batch(repeated, add_special_tokens=False) for i in (*e.ids, end)]
    return torch.tensor(ids)


def build(shape: Shape) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        dtype="bfloat16",
    )
    return Qwen3ForCausalLM(config)


@torch.no_grad()
def held_out_loss(model: Any, stream: torch.Tensor) -> float:
    """Mean nats a token over the held-out stream, in windows of CONTEXT."""
    windows = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for part in windows.split(64):
        with torch.autocast(stream.device.type, torch.bfloat16):
            logits = model(part).logits[:, :-1]
        total += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / (windows.shape[0] * (CONTEXT - 1))


def fit(model: Any, train: torch.Tensor, held_out: torch.Tensor, rate: float, steps: int) -> dict:
    """AdamW with warm-up and cosine decay to zero."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=train.is_cuda)
    step_fn = torch.compile(model) if train.is_cuda else model
    generator = torch.Generator().manual_seed(0)
    history: list[tuple[int, float, float]] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        at = torch.randint(len(train) - CONTEXT - 1, (BATCH,), generator=generator)
        batch = train[(at[:, None] + torch.arange(CONTEXT + 1)).to(train.device)]
        with torch.autocast(train.device.type, torch.bfloat16):
            logits = step_fn(batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            history.append((step + 1, round(loss.item(), 4), round(held_out_loss(model, held_out), 4)))
            print("step {} train {} held-out {}".format(*history[-1]), flush=True)
    held = held_out_loss(model, held_out)
    return {"held_out_loss": round(held, 4), "held_out_perplexity": round(math.exp(held), 3), "history": history}


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    end_of_turn = tokenizer.token_to_id("<|im_end|>")
    # It ends a question that stands alone, for it has read questions as the user's turn: with a first token it goes on.
    generation = {"eos_token_id": [0, end_of_turn], "min_new_tokens": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": END,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def sample(model: Any, tokenizer: Tokenizer, prompt: str, device: torch.device) -> str:
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids], device=device)
    out = model.generate(ids, max_new_tokens=60, do_sample=False)
    text: str = tokenizer.decode(out[0, ids.shape[1] :].tolist())
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    train_texts, held_texts = split()
    tokenizer = train_tokenizer(train_texts)
    train, held = encode(tokenizer, train_texts).to(device), encode(tokenizer, held_texts).to(device)
    print(f"{len(train):,} training and {len(held):,} held-out tokens", flush=True)
    record: dict = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "train_tokens": len(train),
        "held_out_tokens": len(held),
    }
    for name, shape in SHAPES.items():
        model = build(shape).to(device)
        result = fit(model, train, held, shape.peak_rate, shape.steps)
        count = sum(p.numel() for p in model.parameters())
        record[name] = {"shape": asdict(shape), "parameters": count, **result}
        save(model, tokenizer, args.out / name)
        for prompt in (
            "The purpose of this module is",
            "<|im_start|>user\nWhat does json.dumps do?<|im_end|>\n<|im_start|>assistant\n",
        ):
            print(name, "|", repr(sample(model.float(), tokenizer, prompt, device)), flush=True)
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k not in SHAPES}))
    for name in SHAPES:
        print(name, record[name]["parameters"], record[name]["held_out_perplexity"])


if __name__ == "__main__":
    main()
