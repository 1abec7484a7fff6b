"""GGUF files of random checkpoints, by the gguf package's writer as ggml's converter fills it, and the numbers that
they hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from engine.demo.make import CHAT_TEMPLATE, SPECIAL, learn_merges, vocabulary
from engine.demo.passage import PASSAGE
from tests.gguf_blocks import SCALES, blocks

Tensors = dict[str, torch.Tensor]
# The format of a tensor, by its name in a checkpoint.
Choice = Callable[[str], str]
ARCHITECTURES = {"LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA, "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3}


@dataclass(frozen=True)
class Written:
    """A file, and the numbers that its tensors stand for, by their names in a checkpoint."""

    file: Path
    numbers: Tensors


def write(file: Path, config: Mapping[str, Any], tensors: Tensors, choice: Choice, split: int = 0) -> Written:
    """A file of a checkpoint's tensors [N, K] in the formats of `choice`. split: tensors of a file, 0 for one file.

    Formats that the package cannot write hold random blocks, of the standard deviation that the tensor has.
    """
    arch = ARCHITECTURES[config["architectures"][0]]
    name = gguf.MODEL_ARCH_NAMES[arch]
    writer = gguf.GGUFWriter(str(file), name, split_max_tensors=split)
    _describe(writer, config)
    add_tokenizer(writer, config["vocab_size"])
    if name == "llama" and config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(config))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    numbers: Tensors = {}
    for label, tensor in tensors.items():
        if label == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        heads = _heads(label, config) if name == "llama" else None
        wide = tensor.float() if heads is None else permuted(tensor.float(), heads)
        kind = choice(label) if tensor.dim() > 1 else "F32"
        stored = encode(wide, kind, seed=len(numbers))
        given = names.get_name(label, try_suffixes=(".weight", ".bias"))
        assert given is not None, label
        raw = None if kind in ("F32", "F16") else Kind[kind]
        writer.add_tensor(given, stored, raw_dtype=raw)
        held = torch.from_numpy(quants.dequantize(stored, Kind[kind]).astype(np.float32)).reshape(tensor.shape)
        numbers[label] = held if heads is None else unpermuted(held, heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split:
        first = sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]
        return Written(first, numbers)
    return Written(file, numbers)


def encode(wide: torch.Tensor, kind: str, seed: int) -> np.ndarray:
    """A tensor's bytes in a format, or its numbers where the writer takes these."""
    if kind in ("F32", "F16"):
        return wide.numpy().astype(np.float32 if kind == "F32" else np.float16)
    try:
        return quants.quantize(wide.numpy(), Kind[kind])
    except NotImplementedError:
        n, k = wide.shape
        count, size = k // gguf.GGML_QUANT_SIZES[Kind[kind]][0], gguf.GGML_QUANT_SIZES[Kind[kind]][1]
        made = blocks(kind, n, count, seed).view(n, count, size)
        spread = quants.dequantize(made.flatten(1).numpy(), Kind[kind]).std()
        for at in SCALES[kind]:
            scale = made[..., at : at + 2].contiguous().view(torch.float16).float() * float(wide.std() / spread)
            made[..., at : at + 2] = scale.half().view(torch.uint8)
        return made.flatten(1).numpy()


def permuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as ggml's rotary embedding of the llama architecture takes them (convert_hf_to_gguf.py, `permute`)."""
    return w.reshape(heads, 2, len(w) // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape).contiguous()


def unpermuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    return w.reshape(heads, len(w) // heads // 2, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape).contiguous()


def divisors(config: Mapping[str, Any]) -> np.ndarray:
    """What the converter makes of Llama 3's rope scaling, of the numbers of transformers' own function."""
    rope = config["rope_parameters"]
    base = rope["rope_theta"] ** (-torch.arange(0, config["head_dim"], 2, dtype=torch.float64) / config["head_dim"])
    wave = 2 * torch.pi / base
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]) / (
        rope["high_freq_factor"] - rope["low_freq_factor"]
    )
    middle = 1 / ((1 - smooth) / rope["factor"] + smooth)
    whole = torch.full_like(wave, rope["factor"])
    made = torch.where(wave < high, torch.ones_like(wave), torch.where(wave > low, whole, middle))
    return made.numpy().astype(np.float32)


def _heads(label: str, config: Mapping[str, Any]) -> int | None:
    if ".q_proj." in label:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in label else None


def _describe(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    rope = config["rope_parameters"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(15)
    writer.add_quantization_version(2)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tokenizer(writer: gguf.GGUFWriter, count: int) -> None:
    """Byte-level BPE of `count` tokens with a chat template, as the converter writes that of a Qwen3."""
    merges = learn_merges(PASSAGE, count - 256 - len(SPECIAL))
    tokens = list(vocabulary(merges))
    assert len(tokens) == count
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokens.index(SPECIAL[1]))
    writer.add_eos_token_id(tokens.index(SPECIAL[2]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def plain_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json."""
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values
