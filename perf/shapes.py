"""Model folders without weights, for measurements: a published shape and a tokenizer that can name every token id.

    python -m perf.shapes FOLDER qwen3-4b [qwen3-8b …] [PATH/llama-3.1-8b …] [--layers 8] [--positions 163840]
        [--quantization fp8]

A name of the list below, or a folder or file with a published config.json, quantized ones as they are published or by
--quantization. Serve one with load_format "dummy": the weights are seeded random numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    "qwen3-8b": {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    # text part of google/gemma-3-4b-pt
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "eos_token_id": [1, 106],
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_hidden_layers": 34,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 262208,
    },
    # for tests of the harness on a machine without a GPU
    "tiny": {
        **QWEN3,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "vocab_size": 2048,
        "bos_token_id": 2045,
        "eos_token_id": 2046,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    },
}


GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "checkpoint_format": "gptq",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "desc_act": False,
    "lm_head": False,
}
# How published checkpoints say that their weights are quantized.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    # Qwen/Qwen3-8B-FP8
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "fp8-rows": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "ignored_layers": ["lm_head"]},
    # Qwen/Qwen3-8B-AWQ
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "gptq": GPTQ,
    "gptq-order": {**GPTQ, "desc_act": True},
    # compressed-tensors' preset W4A16
    "w4a16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 128,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    },
}


def _quantized(config: dict[str, Any], quantization: str) -> dict[str, Any]:
    """How a published checkpoint of that shape says it. Those of mixtures leave routers out by name; without that some
    servers look for a router's scales, find none, and send every token to the same experts."""
    made = dict(QUANTIZATIONS[quantization])
    if "num_experts" not in config and "n_routed_experts" not in config:
        return made
    first = config.get("first_k_dense_replace", 0)
    gates = [f"model.layers.{layer}.mlp.gate" for layer in range(first, config["num_hidden_layers"])]
    if made["quant_method"] == "gptq":
        return made | {"dynamic": {r"-:.*\.mlp\.gate$": {}}}
    key = next((key for key in ("ignored_layers", "ignore") if key in made), "modules_to_not_convert")
    return made | {key: [*made.get(key, []), *gates]}


# Of DeepSeek-V4, in every layer's attention: its checkpoints leave these as they are, and their configs do not say so.
V4_LEFT_OUT = ("compressor", "indexer.compressor", "indexer.weights_proj")


def _as_stored(config: dict[str, Any]) -> dict[str, Any]:
    """A published config that says of each module whether it is quantized: there are no tensors that would."""
    if config["model_type"] != "deepseek_v4":
        return config
    layers = range(config["num_hidden_layers"])
    left = [f"model.layers.{layer}.attn.{module}" for layer in layers for module in V4_LEFT_OUT]
    said = config["quantization_config"]
    named = [*said.get("modules_to_not_convert", ()), *left]
    return {**config, "quantization_config": {**said, "modules_to_not_convert": named}}


def config_of(name: str) -> dict[str, Any]:
    """The config of a name of SHAPES, of a folder with a config.json, or in a file."""
    path = Path(name)
    found = (
        SHAPES[name] if name in SHAPES else json.loads((path if path.is_file() else path / "config.json").read_text())
    )
    return dict(found)


def write(
    folder: Path,
    name: str,
    layers: int | None = None,
    positions: int | None = None,
    quantization: str | None = None,
    vocab: int | None = None,
) -> Path:
    """Writes FOLDER/NAME with config.json and tokenizer.json; returns it.

    `name` is as `config_of` has it; `layers` keeps the first so many, for a model too large for one GPU; `positions`
    lets contexts grow past what the model was trained for, whose cost is all that is asked; `quantization` is of
    QUANTIZATIONS, and ends the folder's name; `vocab` keeps the first so many tokens, none of which ends a text.

    Raises ValueError for a quantization of what is quantized already.
    """
    config = config_of(name)
    if layers is not None:
        config = _first_layers(config, layers)
    if positions is not None:
        config = {**config, "max_position_embeddings": positions}
    if vocab is not None:
        config = {**config, "vocab_size": vocab, **{f"{kind}_token_id": None for kind in ("bos", "eos", "pad")}}
    target = folder / Path(name).name.removesuffix(".json")
    if quantization is not None:
        if "quantization_config" in config:
            raise ValueError(f"{name} is quantized as its config.json says: leave --quantization out")
        config = {**config, "quantization_config": _quantized(config, quantization)}
        target = target.with_name(f"{target.name}-{quantization}")
    elif "quantization_config" in config:
        config = _as_stored(config)
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    (target / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    _write_tokenizer(target / "tokenizer.json", config["vocab_size"])
    return target


def _first_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same shape with fewer layers: lists with an entry for each layer are cut too."""
    whole = config["num_hidden_layers"]
    cut = {k: v[:layers] for k, v in config.items() if isinstance(v, list) and len(v) >= whole}
    return {**config, **cut, "num_hidden_layers": layers}


def _write_tokenizer(file: Path, size: int) -> None:
    """Byte-level BPE of `size` tokens: bytes, then pairs and triples of printable characters, then named fillers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(letters)}
    plain = [chr(code) for code in range(33, 127)]
    merges = []
    pairs = itertools.product(plain, plain)
    triples = ((a + b, c) for a, b, c in itertools.product(plain, plain, plain))
    for left, right in itertools.chain(pairs, triples):
        if len(vocab) >= size - 8:
            break
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(f"<|{i}|>", normalized=False) for i in range(len(vocab), size)])
    tokenizer.save(str(file), pretty=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", help=f"of {', '.join(SHAPES)}, or a folder or file with a config")
    parser.add_argument("--layers", type=int, help="keep the first so many layers")
    parser.add_argument("--positions", type=int, help="allow contexts of so many tokens")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="quantize the weights of a 16-bit shape")
    args = parser.parse_args()
    for name in args.names:
        print(write(args.folder, name, args.layers, args.positions, args.quantization))


if __name__ == "__main__":
    main()
