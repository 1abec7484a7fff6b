"""What programs that quantize say of how they found the numbers, and of what runs these elsewhere. No torch."""

from __future__ import annotations

# AutoGPTQ, GPTQModel, optimum, AutoAWQ, AutoRound, and transformers, which writes the same keys for GPTQ and AWQ.
SILENT = (
    "act_group_aware", "amp", "autoround_version", "backend", "batch_size", "block_name_to_quantize",
    "cache_block_outputs", "cache_examples_on_gpu", "damp_auto_increment", "damp_percent", "dataset", "disable_exllama",
    "do_fuse", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "exllama_config",
    "fuse_max_seq_len", "gradient_accumulate_steps", "hessian_chunk_size", "hyb_act", "iters", "low_gpu_mem_usage",
    "lr", "max_input_length", "meta", "minmax_lr", "model_file_base_name", "model_free", "model_name_or_path",
    "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize", "modules_to_fuse", "mse",
    "nsamples", "offload_to_disk", "offload_to_disk_path", "pack_impl", "provider", "scale_dtype", "seqlen",
    "static_groups", "to_quant_block_names", "tokenizer", "train_bs", "true_sequential", "use_cuda_fp16", "use_exllama",
    "v2",
)  # fmt: skip
