"""The checkpoints that the gate runs on: each family at small width, with what makes it special left in.

A row is a transformers config; its architecture picks the class. Add a row for a new family: every layer kind at
least twice, real head dimensions, and a context that passes the family's window or original length.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 512


@dataclass(frozen=True)
class Shape:
    """`config` holds keyword arguments of the transformers config class `kind`Config.

    long_prompt is the length of the one long prompt. block_size is that of the engine's cache.
    sequences is how many others there are. branch scales what each part adds to the residual stream, and router the
    scores of experts: in bfloat16 transformers itself would stray beyond the limits without. dtypes are those that it
    is played in.
    """

    name: str
    kind: str
    config: dict[str, Any] = field(hash=False)
    long_prompt: int = 8192
    block_size: int = 16
    sequences: int = 48
    branch: float = 0.5
    router: float = 4.0
    dtypes: tuple[str, ...] = ("float32", "bfloat16")


COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 8448,
    "num_hidden_layers": 2,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

SHAPES = (
    Shape(
        "qwen3",
        "Qwen3",
        {
            **COMMON,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
    ),
    Shape(
        "qwen3-yarn",
        "Qwen3",
        {
            **COMMON,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
            "tie_word_embeddings": False,
        },
    ),
    Shape(
        "llama3",
        "Llama",
        {
            **COMMON,
            "hidden_size": 128,
            "intermediate_size": 224,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            },
            "tie_word_embeddings": False,
        },
    ),
)
