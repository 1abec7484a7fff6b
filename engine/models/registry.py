"""From a checkpoint folder to the family that serves it. Families are imported when asked for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from engine import files
from engine.models.config import ModelConfig
from engine.models.mtp import MtpConfig
from engine.models.reader import ConfigError, Reader, shown
from engine.quant import cache
from engine.quant import config as quant
from engine.quant.method import Method
from engine.weights.rules import Rule

if TYPE_CHECKING:
    from engine.weights.checkpoint import Checkpoint

MAX_BYTES = 16 << 20  # of a config.json, which has kilobytes

# Files of libraries that quantize → the method of what they hold. Before 2023-09 GPTQ's and AWQ's stood nowhere else.
QUANTIZERS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}

# architecture in config.json → module of engine.models
FAMILIES: dict[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "KimiK25ForConditionalGeneration": "deepseek_v3",
    "Kimi_K25ForConditionalGeneration": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
}

# module of engine.models → what config.json may call it as model_type; transformers goes by that name alone
MODEL_TYPES: dict[str, tuple[str, ...]] = {
    "deepseek_v3": ("deepseek_v3", "kimi_k2", "kimi_k25"),
    "gemma3": ("gemma3", "gemma3_text"),
    "qwen3_5": ("qwen3_5", "qwen3_5_text"),
}


class Family(Protocol):
    """What a family module provides. `unused`, `rename`, `unstack` and `mtp_config` may be left out."""

    def parse(self, reader: Reader) -> ModelConfig:
        """Read every value that matters; what is not implemented is refused by name."""
        ...

    def rules(self, config: ModelConfig) -> list[Rule]:
        """Where each parameter of the decoder comes from."""
        ...


def unused(family: Family, config: ModelConfig) -> tuple[str, ...]:
    """Name patterns of tensors that a checkpoint may hold and serving text does without."""
    extra: Callable[[ModelConfig], tuple[str, ...]] = getattr(family, "unused", lambda _: ())
    return extra(config)


def mtp_config(family: Family, config: ModelConfig) -> MtpConfig | None:
    """The module that predicts further tokens, where the family has one and the checkpoint says so."""
    made: Callable[[ModelConfig], MtpConfig | None] = getattr(family, "mtp_config", lambda _: None)
    return made(config)


def copies(config: ModelConfig) -> dict[str, str]:
    """Tensors that a checkpoint may hold beside those of the same values: a tied head."""
    return {"lm_head.weight": f"{config.prefix}.embed_tokens.weight"} if config.tied else {}


def rename(family: Family) -> Callable[[str], str]:
    """From the name of a checkpoint's tensor to the one that the family's rules use, where releases differ."""
    same: Callable[[str], str] = getattr(family, "rename", str)
    return same


def as_ruled(family: Family, checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as the family's rules name it, with a tensor for each matrix where releases stack several."""
    apart: Callable[[Checkpoint], Checkpoint] = getattr(family, "unstack", lambda found: found)
    return apart(checkpoint.renamed(rename(family)).flattened())


def family_of(values: dict[str, Any]) -> Family:
    """The family of a config.json. Raises ConfigError with the list of known architectures, or of the model types that
    go with the one it names."""
    named = values.get("architectures") or []
    known = [FAMILIES[name] for name in named if str(name) in FAMILIES] if isinstance(named, list) else []
    if not known:
        said = ", ".join(map(str, named))[:200] or "none" if isinstance(named, list) else shown(named)
        raise ConfigError(
            f"config.json names the architecture {said}, which is not implemented; "
            f"implemented: {', '.join(sorted(FAMILIES))}"
        )
    types = MODEL_TYPES.get(known[0], (known[0],))
    Reader(values).require("model_type", *types, default=types[0])
    return cast(Family, importlib.import_module(f"engine.models.{known[0]}"))


def parse(values: dict[str, Any]) -> ModelConfig:
    """Parse the content of a config.json. Raises ConfigError for anything that is not implemented."""
    reader = Reader(values)
    config = family_of(values).parse(reader)
    reader.finish()
    quant.read(values)
    return config


def quantization(folder: str | Path) -> Method | None:
    """How config.json, or a library's own file where that is silent, says that weights are quantized. Raises
    ConfigError as `load` does."""
    said = quant.read(values(folder))
    for name, method in QUANTIZERS.items():
        file = Path(folder) / name
        if said is None and file.exists():
            own = _json(file)
            inner = own.get("quantization") if method == "modelopt" else own
            if isinstance(inner, dict):
                said = quant.read({"quantization": {"quant_method": method, **inner}}, name)
    return said


def cache_is_fp8(folder: str | Path) -> bool:
    """Whether the checkpoint says that its cache holds 8-bit floats. Raises ConfigError for a cache of another kind."""
    modelopt = Path(folder) / "hf_quant_config.json"
    return cache.declared(values(folder), _json(modelopt) if modelopt.exists() else {})


def values(folder: str | Path) -> dict[str, Any]:
    """The content of config.json. Raises ConfigError as `load` does."""
    return _json(Path(folder) / "config.json")


def load(folder: str | Path) -> tuple[ModelConfig, Family]:
    """Read config.json, and the end-of-sequence ids that generation_config.json adds to it.

    Raises ConfigError when the folder is no checkpoint, or needs something that is not implemented.
    """
    said = values(folder)
    config = parse(said)
    generation = Path(folder) / "generation_config.json"
    if generation.exists():
        reader = Reader(_json(generation), generation.name)
        more = reader.token_ids("eos_token_id", config.vocab_size)
        config = replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + more)))
    return config, family_of(said)


def _json(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(files.read(path, MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: a model is a folder with config.json and *.safetensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(held, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(held).__name__}")
    return held
