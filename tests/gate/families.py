"""Shapes of the families beyond the dense ones: small width, real topology. Every layer kind stands at least twice,
heads have their real sizes where that is affordable, and windows and original lengths lie within the prompts."""

from __future__ import annotations

from dataclasses import replace

from tests.gate.shapes import COMMON, Shape

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 128,
}
LATENT = {
    **COMMON,
    "num_hidden_layers": 4,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 48,
    "tie_word_embeddings": False,
}

MISTRAL = Shape(
    "mistral",
    "Mistral",
    {
        **COMMON,
        "hidden_size": 128,
        "intermediate_size": 224,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 100,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    },
)

QWEN3_MOE = Shape(
    "qwen3-moe",
    "Qwen3Moe",
    {
        **COMMON,
        "num_hidden_layers": 4,
        "hidden_size": 96,
        "intermediate_size": 160,
        "moe_intermediate_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "mlp_only_layers": [0, 2],
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
    },
)

GEMMA3 = Shape(
    "gemma3",
    "Gemma3Text",
    {
        **COMMON,
        "num_hidden_layers": 6,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 168,
        "sliding_window": 100,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
)

DEEPSEEK_V2 = Shape(
    "deepseek-v2",
    "DeepseekV2",
    {
        **LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 32,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "rope_parameters": {**YARN, "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
)

KIMI = Shape(
    "kimi-k2",
    "DeepseekV3",
    {
        **LATENT,
        "q_lora_rank": 64,
        "n_routed_experts": 48,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_parameters": {**YARN, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    branch=0.2,
    router=1.0,
)

DEEPSEEK_V3 = Shape(
    "deepseek-v3",
    "DeepseekV3",
    {
        **KIMI.config,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    branch=0.1,
    router=1.0,
)

QWEN3_5 = Shape(
    "qwen3.5",
    "Qwen3_5Text",
    {
        **COMMON,
        "num_hidden_layers": 6,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": True,
    },
    branch=0.2,
)

DEEPSEEK_V4 = Shape(
    "deepseek-v4",
    "DeepseekV4",
    {
        **COMMON,
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "moe_intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 48,
        "o_groups": 2,
        "o_lora_rank": 32,
        "sliding_window": 64,
        "compress_ratios": [0, 0, 4, 128, 4, 128],
        "rope_theta": 1e4,
        "compress_rope_theta": 16e4,
        "rope_scaling": {**{k: v for k, v in YARN.items() if k != "rope_theta"}, "factor": 16},
        "index_n_heads": 16,
        "index_head_dim": 128,
        "index_topk": 16,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 1.0,
        "num_hash_layers": 2,
        "tie_word_embeddings": False,
    },
    block_size=128,
    branch=0.2,
    router=1.0,
)

# Groups of the product behind attention, and experts, are whole blocks.
DEEPSEEK_V4_BLOCKS = replace(
    DEEPSEEK_V4,
    name="deepseek-v4-blocks",
    config={
        **DEEPSEEK_V4.config,
        **{"o_lora_rank": 128, "moe_intermediate_size": 256, "num_hidden_layers": 4},
        "compress_ratios": [0, 4, 128, 4],
    },
)

GPT_OSS = Shape(
    "gpt-oss",
    "GptOss",
    {
        **COMMON,
        "num_hidden_layers": 4,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "swiglu_limit": 1.0,
        "rope_parameters": {**YARN, "rope_theta": 150000.0, "factor": 64, "truncate": False},
        "tie_word_embeddings": False,
    },
    branch=0.3,
)

FAMILIES = (MISTRAL, QWEN3_MOE, GEMMA3, DEEPSEEK_V2, KIMI, DEEPSEEK_V3, QWEN3_5, DEEPSEEK_V4, GPT_OSS)

# Sequences, by their place, where a choice of an expert or an entry stands on its edge, and in which dtype. There
# transformers itself is beyond that dtype's limits when its embeddings move by a rounding error (test_oracle.py). They
# are not compared.
ON_AN_EDGE = {DEEPSEEK_V4.name: {32: "float32"}, QWEN3_MOE.name: {7: "bfloat16"}}
