"""GGUF files of random checkpoints, by the gguf package's writer as ggml's converter fills it, and the numbers that
they hold."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType as Kind

from engine.demo.make import CHAT_TEMPLATE, SPECIAL, learn_merges, vocabulary
from engine.demo.passage import PASSAGE
from kernels.linear.gguf_cases import blocks

Tensors = dict[str, torch.Tensor]
# The format of a tensor, by its name in a checkpoint.
Choice = Callable[[str], str]
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": gguf.MODEL_ARCH.DEEPSEEK2,
    "Gemma3ForCausalLM": gguf.MODEL_ARCH.GEMMA3,
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
}


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
    describe(writer, config)
    add_tokenizer(writer, config["vocab_size"])
    if name == "llama" and config["rope_parameters"]["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(config))
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    numbers: Tensors = {}
    for label, stored in stored_as(tensors, config, name):
        plain = stored.tensor.dim() == 1 or label.endswith("mlp.gate.weight")
        kind = "F32" if plain else choice(label)
        data = encode(stored.tensor.float(), kind, seed=len(numbers))
        given = names.get_name(label, try_suffixes=(".weight", ".bias"))
        assert given is not None, label
        writer.add_tensor(given, data, raw_dtype=None if kind in ("F32", "F16") else Kind[kind])
        held = torch.from_numpy(quants.dequantize(data, Kind[kind]).astype(np.float32)).reshape(stored.tensor.shape)
        stored.undo(held, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split:
        first = sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))[0]
        return Written(first, numbers)
    return Written(file, numbers)


@dataclass(frozen=True)
class Stored:
    """What a file holds; undo puts its numbers where a checkpoint has them."""

    tensor: torch.Tensor
    undo: Callable[[torch.Tensor, Tensors], None]


def stored_as(tensors: Tensors, config: Mapping[str, Any], arch: str) -> Iterator[tuple[str, Stored]]:
    """What ggml's converter makes of a checkpoint's tensors, by the names that it looks up."""

    def same(name: str, back: Callable[[torch.Tensor], torch.Tensor] = lambda held: held) -> Any:
        return lambda held, numbers: numbers.update({name: back(held).contiguous()})

    for name, tensor in tensors.items():
        expert = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(\w+\.weight)", name)
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if expert is not None:
            before, number, part = expert.groups()
            if number == "0":
                every = [f"{before}.{i}.{part}" for i in range(experts_of(config))]
                stack = torch.stack([tensors[each] for each in every])
                yield f"{before}.{part}", Stored(stack, partial(unstacked, every))
        elif arch == "llama" and (heads := heads_of(name, config)):
            yield name, Stored(permuted(tensor, heads), same(name, lambda held, h=heads: unpermuted(held, h)))  # type: ignore[misc]
        elif arch == "gemma3" and name.endswith("norm.weight"):
            yield name, Stored(tensor.float() + 1, same(name, lambda held: held - 1))
        elif name.endswith("e_score_correction_bias"):
            yield name.removesuffix("_bias") + ".bias", Stored(tensor, same(name))
        elif name.endswith("kv_b_proj.weight") and config.get("split_latent", True):
            yield from latent_up(name, tensor, config)
        else:
            yield name, Stored(tensor, same(name))


def unstacked(names: list[str], held: torch.Tensor, numbers: Tensors) -> None:
    numbers.update(zip(names, held, strict=True))


def latent_up(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Stored]]:
    """A head's keys [R, nope] and values [Dv, R], each a tensor."""
    nope, value, heads = config["qk_nope_head_dim"], config["v_head_dim"], config["num_attention_heads"]
    keys, values = tensor.unflatten(0, (heads, nope + value)).split((nope, value), dim=1)

    def put(part: slice, turn: bool) -> Callable[[torch.Tensor, Tensors], None]:
        def undo(held: torch.Tensor, numbers: Tensors) -> None:
            whole = numbers.setdefault(name, torch.zeros(tensor.shape)).view(heads, nope + value, -1)
            whole[:, part] = held.transpose(1, 2) if turn else held

        return undo

    yield name.replace("kv_b", "k_b"), Stored(keys.transpose(1, 2).contiguous(), put(slice(0, nope), True))
    yield name.replace("kv_b", "v_b"), Stored(values.contiguous(), put(slice(nope, None), False))


def experts_of(config: Mapping[str, Any]) -> int:
    return int(next(config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config))


def encode(wide: torch.Tensor, kind: str, seed: int) -> np.ndarray:
    """A tensor's bytes in a format, or its numbers where the writer takes these."""
    if kind in ("F32", "F16"):
        return wide.numpy().astype(np.float32 if kind == "F32" else np.float16)
    try:
        return quants.quantize(wide.numpy(), Kind[kind])
    except NotImplementedError:
        *rows, k = wide.shape
        each, _ = gguf.GGML_QUANT_SIZES[Kind[kind]]
        generator = torch.Generator().manual_seed(seed)
        return blocks(kind, math.prod(rows), k // each, generator, float(wide.std())).view(*rows, -1).numpy()


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


def heads_of(label: str, config: Mapping[str, Any]) -> int | None:
    if ".q_proj." in label:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in label else None


def describe(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    """The metadata that the converter writes of a config."""
    rope = config["rope_parameters"]
    local = rope.get("sliding_attention", {})
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(15)
    writer.add_quantization_version(2)
    if "kv_lora_rank" in config:
        describe_latent(writer, config)
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
        writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(experts_of(config))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if local:
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base_swa(local["rope_theta"])
        if config["final_logit_softcapping"] is not None:
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        if rope.get("beta_fast", 32) != 32:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])


def describe_latent(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    whole, rope_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["qk_rope_head_dim"]
    rank, value, split = config["kv_lora_rank"], config["v_head_dim"], config.get("split_latent", True)
    writer.add_head_count_kv(1 if split else config["num_attention_heads"])
    writer.add_key_length(rank + rope_dim if split else whole)
    writer.add_value_length(rank if split else value)
    if split:
        writer.add_key_length_mla(whole)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_vocab_size(config["vocab_size"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config["model_type"] == "deepseek_v3":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


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
