"""The tensors of each architecture of GGUF files: their names are those of ggml's gguf-py (`constants.py`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.gguf_file import GgufError, GgufFile, open_gguf
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.gguf import Layout, entries, first_file

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
# A sandwich layer has norms before and behind each part.
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
SHARED = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
# Without an ending in a checkpoint.
CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def _paired(held: GgufFile) -> Layout:
    """Rows of queries and keys stand as an interleaved rotary embedding takes them: the converter turns them."""
    heads, groups = (
        held.metadata.get(f"{held.architecture}.attention.{key}") for key in ("head_count", "head_count_kv")
    )
    counts = {"attn_q": heads, "attn_k": heads if groups is None else groups}
    if not all(type(count) is int for count in counts.values()):
        raise WeightsError(f"{held.architecture}.attention.head_count and head_count_kv must be whole numbers")
    return Layout(OUTER, LAYER, paired=counts)  # type: ignore[arg-type]


def _plain(held: GgufFile) -> Layout:
    return Layout(OUTER, {**LAYER, **HEAD_NORMS})


def _routed(held: GgufFile) -> Layout:
    return Layout(OUTER, {**LAYER, **HEAD_NORMS, **ROUTER}, EXPERTS)


def _sandwich(held: GgufFile) -> Layout:
    """Norms are stored as what they multiply by, and a checkpoint has them around zero."""
    return Layout(OUTER, {**LAYER, **HEAD_NORMS, **SANDWICH}, norm_offset=1.0)


def _latent(held: GgufFile) -> Layout:
    return Layout(OUTER, {**LAYER, **LATENT, **ROUTER, **SHARED}, EXPERTS, CORRECTION)


LAYOUTS: dict[str, Callable[[GgufFile], Layout]] = {
    "deepseek2": _latent,
    "gemma3": _sandwich,
    "llama": _paired,
    "qwen3": _plain,
    "qwen3moe": _routed,
}


def open_folder(folder: str | Path) -> Checkpoint:
    """The checkpoint in a folder: of safetensors files, or of a GGUF file where there are none. Raises WeightsError."""
    folder = Path(folder)
    file = None if any(folder.glob("*.safetensors")) else first_file(folder)
    if file is None:
        return Checkpoint.open(folder)
    try:
        held = open_gguf(file)
    except GgufError as error:
        raise WeightsError(str(error)) from None
    made = LAYOUTS.get(held.architecture)
    if made is None:
        raise WeightsError(f"{file} is {held.recognised()}; of that architecture no tensors are read from GGUF files")
    return Checkpoint(entries(held, made(held)))
