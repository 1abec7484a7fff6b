"""From the metadata of a GGUF file to the config.json that a checkpoint of the model would have.

Keys are those of ggml's docs/gguf.md. What could change a token and is not implemented is refused by name, as in a
config.json.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from engine.gguf_file import GgufFile
from engine.models.reader import LARGEST_POSITION, ConfigError, Reader

# What the file's quantized blocks are laid out by; it has not changed since 2023.
QUANTIZATION_VERSION = 2
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Of every Llama 3 after the first; files hold the frequencies' divisors that they give, and not the numbers.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192
CLOSE = 1e-4

Values = dict[str, Any]


def config(held: GgufFile, file: str, end_ids: Sequence[int], frequencies: Sequence[float] | None) -> Values:
    """The content of config.json. end_ids: tokens that end a text. frequencies: the tensor of divisors of the rotary
    embedding's frequencies, if the file has one.

    Raises ConfigError for a value that is not implemented, with the key in it.
    """
    name = held.architecture
    if name not in ARCHITECTURES:
        raise ConfigError(
            f"{file} is {held.recognised()}; that architecture is not implemented for GGUF files. Implemented: "
            f"{', '.join(ARCHITECTURES)}. Give the model's checkpoint folder in Hugging Face layout instead"
        )
    general = Reader({key: held.metadata[key] for key in held.metadata if key.startswith("general.")}, file)
    general.require("general.type", "model", default="model")
    general.require("general.quantization_version", QUANTIZATION_VERSION, default=QUANTIZATION_VERSION)
    values = {
        key.removeprefix(f"{name}."): list(value) if isinstance(value, tuple) else _exact(value)
        for key, value in held.metadata.items()
        if key.startswith(f"{name}.")
    }
    reader = Reader(values, f"{file}: {name}")
    made = ARCHITECTURES[name](reader, held, frequencies)
    embedding = held.tensors.get("token_embd.weight")
    reader.check(embedding is not None, "the file has no tensor token_embd.weight")
    assert embedding is not None
    tokens = held.metadata.get("tokenizer.ggml.tokens")
    count = embedding.shape[0]
    reader.check(
        isinstance(tokens, tuple) and len(tokens) == count,
        f"its tokenizer must have as many tokens as token_embd.weight has rows, {count}",
    )
    reader.require("vocab_size", count, default=count)
    reader.finish()
    made |= {
        "vocab_size": count,
        "tie_word_embeddings": "output.weight" not in held.tensors,
        "dtype": _dtype(held),
        "eos_token_id": list(end_ids),
        "bos_token_id": held.metadata.get("tokenizer.ggml.bos_token_id"),
    }
    return made


def _decoder(reader: Reader, architecture: str, model_type: str) -> Values:
    """What all architectures say of themselves."""
    heads, hidden = reader.size("attention.head_count"), reader.size("embedding_length")
    head_dim = reader.size("attention.key_length", hidden // heads)
    reader.require("attention.value_length", head_dim, default=head_dim)
    reader.require("rope.dimension_count", head_dim, default=head_dim)
    reader.require("attention.causal", True, default=True)
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": reader.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": reader.positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.positive("rope.freq_base", 10000.0),
        "max_position_embeddings": reader.size("context_length", most=LARGEST_POSITION),
    }


def _dense(reader: Reader) -> Values:
    for key in ("expert_count", "expert_used_count"):
        reader.refuse(key, "experts of this architecture are not read", 0)
    return {"intermediate_size": reader.size("feed_forward_length"), "hidden_act": "silu"}


def _scaling(reader: Reader, head_dim: int, theta: float, frequencies: Sequence[float] | None) -> Values:
    """rope_scaling, where the file says of one."""
    kind = reader.require("rope.scaling.type", "none", "linear", "yarn", default="none")
    factor = reader.positive("rope.scaling.factor", 1.0)
    original = reader.size("rope.scaling.original_context_length", None, most=LARGEST_POSITION)
    reader.skip("rope.scaling.finetuned")
    reader.require("rope.scaling.attn_factor", 1.0, default=1.0)
    if frequencies is not None and any(value != 1.0 for value in frequencies):
        reader.check(kind == "none", "rope.scaling.type stands beside the tensor rope_freqs.weight")
        return {"rope_scaling": _llama3(reader, head_dim, theta, frequencies)}
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        reader.check(original is not None, "rope.scaling.original_context_length is missing, which YaRN needs")
        said = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        return {"rope_scaling": said}
    reader.check(factor == 1.0, f"rope.scaling.factor = {factor} stands without a rope.scaling.type")
    return {}


def _llama3(reader: Reader, head_dim: int, theta: float, divisors: Sequence[float]) -> Values:
    """Llama 3's scaling, told by the divisors that it gives: long waves are slowed by the factor, short ones not at
    all, and those between by a mean of both."""
    factor = max(divisors)
    wanted = []
    for channel in range(0, head_dim, 2):
        wave = 2 * math.pi * theta ** (channel / head_dim)
        share = min(max((ORIGINAL / wave - LOW) / (HIGH - LOW), 0.0), 1.0)
        wanted.append(1 / ((1 - share) / factor + share))
    close = len(divisors) == len(wanted) and all(
        abs(one - other) <= CLOSE * other for one, other in zip(divisors, wanted, strict=True)
    )
    reader.check(
        close,
        f"rope_freqs.weight is not what Llama 3's scaling gives with low_freq_factor {LOW}, high_freq_factor {HIGH} "
        f"and {ORIGINAL} original positions; other frequencies are not implemented",
    )
    return {
        "rope_type": "llama3",
        "factor": _exact(factor),
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }


def _llama(reader: Reader, held: GgufFile, frequencies: Sequence[float] | None) -> Values:
    made = {**_decoder(reader, "LlamaForCausalLM", "llama"), **_dense(reader)}
    reader.require("attention.scale", made["head_dim"] ** -0.5, default=made["head_dim"] ** -0.5)
    made |= {
        "attention_bias": "blk.0.attn_q.bias" in held.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in held.tensors,
    }
    return {**made, **_scaling(reader, made["head_dim"], made["rope_theta"], frequencies)}


def _qwen3(reader: Reader, held: GgufFile, frequencies: Sequence[float] | None) -> Values:
    made = {**_decoder(reader, "Qwen3ForCausalLM", "qwen3"), **_dense(reader), "attention_bias": False}
    return {**made, **_scaling(reader, made["head_dim"], made["rope_theta"], frequencies)}


# What reads the metadata and notices which tensors there are, by the file's architecture.
ARCHITECTURES: dict[str, Callable[[Reader, GgufFile, Sequence[float] | None], Values]] = {
    "llama": _llama,
    "qwen3": _qwen3,
}


def _dtype(held: GgufFile) -> str:
    """That of matrices, where all are stored as they are and alike; quantized ones come from bfloat16 mostly."""
    names = {tensor.format.name for tensor in held.tensors.values() if len(tensor.shape) > 1}
    return DTYPES.get(names.pop(), "bfloat16") if len(names) == 1 else "bfloat16"


def _exact(value: Any) -> Any:
    """Of a 32-bit float the shortest decimal that it is, which is what was written into it."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    shortened = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in shortened if struct.unpack("<f", struct.pack("<f", short))[0] == value), value)
