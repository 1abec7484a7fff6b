"""Makes a small checkpoint in Hugging Face layout, the same bytes on every machine.

    python -m engine.demo.make OUT

The weights are seeded noise, so its answers are noise too; it shows that the whole path works without a download.
Everything is computed in integers from SHAKE-256 (FIPS 202) and written here, so neither the Python version nor the
version of a library changes a byte.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from engine.demo.passage import PASSAGE

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_MERGES = 381
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 192, 4, 6, 2, 32, 512
MAX_POSITIONS = 8192
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'</tools>\\nCall one: <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\\n\' }}{% endif %}'
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint to `folder`: float32 weights of a Qwen3 shape, byte-level BPE, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = learn_merges(PASSAGE, NUM_MERGES)
    vocab = vocabulary(merges)
    _write_json(folder / "tokenizer.json", tokenizer_json(vocab, merges))
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    _write_json(folder / "generation_config.json", {"eos_token_id": [0, 2], "pad_token_id": 0})
    _write_json(folder / "config.json", config_json(len(vocab)))
    write_safetensors(folder / "model.safetensors", weights(len(vocab), seed))


def learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """The `count` merges of byte pair encoding (Sennrich et al. 2016) over the words of `text`; ties by name."""
    words = Counter(f"Ġ{word}" for word in text.split())
    split = {word: tuple(word) for word in words}
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in zip(split[word], split[word][1:], strict=False):
                pairs[pair] += times
        if not pairs:
            raise ValueError(f"the text has only {len(merges)} merges, {count} were asked for")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        split = {word: _merged(parts, best) for word, parts in split.items()}
    return merges


def _merged(parts: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] += part
        else:
            out.append(part)
    return tuple(out)


def vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Special tokens, the 256 bytes in GPT-2's printable stand-ins, then the merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = [chr(byte) for byte in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]
    tokens = dict.fromkeys([*SPECIAL, *stand_ins, *(left + right for left, right in merges)])
    return {token: i for i, token in enumerate(tokens)}


def tokenizer_json(vocab: dict[str, int], merges: list[tuple[str, str]]) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[token], "content": token, **plain} for token in SPECIAL],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_of]},
        "post_processor": None,
        "decoder": bytes_of,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": CHAT_TEMPLATE,
    "model_max_length": MAX_POSITIONS,
    "clean_up_tokenization_spaces": False,
}


def config_json(vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": LAYERS,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Hugging Face tensor names -> float32 values, uniform with the variance that keeps activations near one."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab_size, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{layer}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (vocab_size, HIDDEN)}
    return {name: _tensor(name, shape, seed) for name, shape in shapes.items()}


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Noise of the tensor's own: SHAKE-256 of its name, as 16-bit integers, times one power of two or a norm's one."""
    raw = hashlib.shake_256(f"nereid {seed} {name}".encode()).digest(2 * math.prod(shape))
    unit = np.frombuffer(raw, "<i2").astype("<f4").reshape(shape) / np.float32(32768)
    if len(shape) == 1:
        return np.float32(1) + unit * np.float32(0.125)
    fan_in = shape[-1] if "embed_tokens" not in name else 3
    return unit * np.float32(2.0 ** round(math.log2(math.sqrt(3 / fan_in))))


def write_safetensors(file: Path, tensors: dict[str, np.ndarray]) -> None:
    """The safetensors format: length of the header, JSON header, tensors one after the other, little endian."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            out.write(tensor.tobytes())


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)


if __name__ == "__main__":
    main()
