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
GEMMA_27B_LAYERS = 62
# What experts' scores are made with, by its number in a file.
SOFTMAX, SIGMOID = 1, 2

# Sampling that a file recommends → what a generation_config.json calls it.
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}

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


def generation(held: GgufFile) -> Values:
    """The content of generation_config.json: sampling that requests may choose otherwise; empty where the file says
    nothing of it."""
    said = {name: held.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: _exact(value) for name, value in said.items() if value is not None}


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
        said: Values = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for key in ("beta_fast", "beta_slow"):
            beta = reader.positive(f"rope.scaling.yarn_{key}", None)
            said |= {} if beta is None else {key: beta}
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


def _qwen3moe(reader: Reader, held: GgufFile, frequencies: Sequence[float] | None) -> Values:
    made = {**_decoder(reader, "Qwen3MoeForCausalLM", "qwen3_moe"), "hidden_act": "silu", "attention_bias": False}
    inner = reader.size("expert_feed_forward_length")
    # Of layers without experts, which files of this architecture do not have.
    made["intermediate_size"] = reader.size("feed_forward_length", inner)
    reader.require("expert_weights_norm", True, default=True)
    # Of Qwen3-Coder, which has none.
    reader.require("expert_shared_feed_forward_length", 0, default=0)
    made |= {
        "num_experts": reader.size("expert_count"),
        "num_experts_per_tok": reader.size("expert_used_count"),
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }
    return {**made, **_scaling(reader, made["head_dim"], made["rope_theta"], frequencies)}


def _gemma3(reader: Reader, held: GgufFile, frequencies: Sequence[float] | None) -> Values:
    made = {**_decoder(reader, "Gemma3ForCausalLM", "gemma3_text"), **_dense(reader)}
    del made["hidden_act"]
    layers, heads = made["num_hidden_layers"], made["num_attention_heads"]
    window = reader.size("attention.sliding_window", None, most=LARGEST_POSITION)
    every = reader.size("attention.sliding_window_pattern", 6) if window else 1
    reader.refuse("attn_logit_softcapping", "scores are left as they are")
    made |= {
        "hidden_activation": "gelu_pytorch_tanh",
        # Files do not say it. Scores of the one model of this depth are scaled by another width than a head's.
        "query_pre_attn_scalar": made["hidden_size"] // heads if layers == GEMMA_27B_LAYERS else made["head_dim"],
        "layer_types": ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)],
        "rope_local_base_freq": reader.positive("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": reader.positive("final_logit_softcapping", None),
        **({"sliding_window": window} if window else {}),
    }
    return {**made, **_scaling(reader, made["head_dim"], made["rope_theta"], frequencies)}


def _deepseek2(reader: Reader, held: GgufFile, frequencies: Sequence[float] | None) -> Values:
    """DeepSeek-V2 and V3, and Kimi-K2, which differ in what experts are chosen by."""
    reader.check(frequencies is None, "rope_freqs.weight is not implemented for this architecture")
    heads, kv_rank = reader.size("attention.head_count"), reader.size("attention.kv_lora_rank")
    rope_dim = reader.size("rope.dimension_count")
    key, value = (reader.size(f"attention.{part}_length_mla", None) for part in ("key", "value"))
    if key is None or value is None:
        # Of before caches held latents: the widths of a head.
        reader.require("attention.head_count_kv", heads, default=heads)
        key, value = reader.size("attention.key_length"), reader.size("attention.value_length")
    else:
        reader.require("attention.head_count_kv", 1, default=1)
        reader.require("attention.key_length", kv_rank + rope_dim, default=kv_rank + rope_dim)
        reader.require("attention.value_length", kv_rank, default=kv_rank)
    reader.check(key > rope_dim, f"keys of {key} channels have no room for rope.dimension_count = {rope_dim}")
    sigmoid = reader.require("expert_gating_func", SOFTMAX, SIGMOID, default=SOFTMAX) == SIGMOID
    groups = reader.size("expert_group_count", 1)
    name = "V3" if sigmoid else "V2"
    return {
        "architectures": [f"Deepseek{name}ForCausalLM"],
        "model_type": f"deepseek_{name.lower()}",
        "hidden_size": reader.size("embedding_length"),
        "num_hidden_layers": reader.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": reader.size("attention.q_lora_rank", None),
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": key - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value,
        "attention_bias": False,
        "hidden_act": "silu",
        "intermediate_size": reader.size("feed_forward_length"),
        "first_k_dense_replace": reader.size("leading_dense_block_count", 0, least=0),
        "moe_intermediate_size": reader.size("expert_feed_forward_length"),
        "n_routed_experts": reader.size("expert_count"),
        "num_experts_per_tok": reader.size("expert_used_count"),
        "n_shared_experts": reader.size("expert_shared_count", 0, least=0),
        "n_group": groups,
        "topk_group": reader.size("expert_group_used_count", 1),
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "noaux_tc" if sigmoid else "greedy" if groups == 1 else "group_limited_greedy",
        "norm_topk_prob": reader.read(bool, "expert_weights_norm", False),
        "routed_scaling_factor": reader.read(float, "expert_weights_scale", 0.0) or 1.0,
        "rms_norm_eps": reader.positive("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.positive("rope.freq_base", 10000.0),
        "max_position_embeddings": reader.size("context_length", most=LARGEST_POSITION),
        **_latent_scaling(reader),
    }


def _latent_scaling(reader: Reader) -> Values:
    """rope_scaling of DeepSeek's: YaRN, whose factor on scores the file gives as a tenth of mscale_all_dim."""
    said = _scaling(reader, 0, 0.0, None)
    tenth = reader.read(float, "rope.scaling.yarn_log_multiplier", 0.0)
    if not said:
        return said
    scaling = said["rope_scaling"]
    reader.check(scaling["rope_type"] == "yarn", "rope.scaling.type must be yarn or none for this architecture")
    mscale = float(f"{10 * tenth:.6g}")
    return {"rope_scaling": {**scaling, "mscale": mscale, "mscale_all_dim": mscale}}


# What reads the metadata and notices which tensors there are, by the file's architecture.
ARCHITECTURES: dict[str, Callable[[Reader, GgufFile, Sequence[float] | None], Values]] = {
    "deepseek2": _deepseek2,
    "gemma3": _gemma3,
    "llama": _llama,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
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
