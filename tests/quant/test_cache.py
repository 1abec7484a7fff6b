"""What a checkpoint says of its cache, and the scales that it holds for one of 8-bit floats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import CacheConfig
from engine.models.reader import ConfigError
from engine.quant import cache, config
from engine.quant.cache_scales import found
from engine.weights.checkpoint import Checkpoint, WeightsError
from kernels.cache_scales import UNSCALED, CacheScales

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True, "observer": "x"}


def compressed(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, **changes}}}


@pytest.mark.parametrize(
    ("said", "modelopt", "fp8"),
    [
        ({}, {}, False),
        ({"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": None}}, {}, False),
        (compressed(), {}, True),
        ({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": "static"}}, {}, False),
        (
            {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
            {},
            True,
        ),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, {}, True),
        ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, {}, True),
        ({"quantization_config": {"quant_library": "modelopt", "kv_cache_scheme": "FP8"}}, {}, True),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True),
        ({}, {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, False),
    ],
)
def test_a_checkpoint_says_that_its_cache_is_quantized(
    said: dict[str, Any], modelopt: dict[str, Any], fp8: bool
) -> None:
    assert cache.declared(said, modelopt) is fp8


@pytest.mark.parametrize(
    ("said", "modelopt", "sentence"),
    [
        (compressed(type="int"), {}, "kv_cache_scheme: type = 'int'"),
        (compressed(num_bits=4), {}, "num_bits = 4"),
        (compressed(strategy="attn_head"), {}, "strategy = 'attn_head'"),
        (compressed(dynamic=True), {}, "dynamic = True"),
        (compressed(symmetric=False), {}, "symmetric = False"),
        (compressed(surprise=1), {}, "surprise = 1"),
        ({"quantization_config": {"kv_cache_scheme": 3}}, {}, "must be an object"),
        ({"quantization_config": {"kv_cache_scheme": "INT8"}}, {}, "'INT8' is not implemented, FP8 is"),
        ({}, {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "'NVFP4' is not implemented"),
    ],
)
def test_a_cache_of_another_kind_is_refused(said: dict[str, Any], modelopt: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        cache.declared(said, modelopt)


def test_a_calibrated_fp8_checkpoint_is_read() -> None:
    said = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    assert config.read({"quantization_config": said}) is not None


def test_weights_stay_as_they_are_where_the_cache_alone_is_quantized() -> None:
    assert config.read(compressed()) is None


@pytest.mark.parametrize(
    ("setting", "says", "fp8"),
    [("auto", False, False), ("auto", True, True), ("fp8", False, True), ("16bit", True, False)],
)
def test_a_setting_goes_before_what_the_checkpoint_says(setting: str, says: bool, fp8: bool) -> None:
    assert cache.holds_fp8(CacheConfig(dtype=setting).storage_dtype, says) is fp8


def test_other_dtypes_are_refused() -> None:
    assert CacheConfig(dtype="fp8_e4m3").storage_dtype == "fp8"
    with pytest.raises(ValueError, match=r"fp8_e5m2' is not there.*take fp8"):
        CacheConfig(dtype="fp8_e5m2")
    with pytest.raises(ValueError, match=r"'int8' is not there: it is auto, fp8 \(fp8_e4m3\) or 16bit$"):
        CacheConfig(dtype="int8")


def stored(folder: Path, **scales: float | list[float]) -> Checkpoint:
    """A checkpoint of scales of layer 1, by the ends of their names, with dots for "__"."""
    tensors = {
        f"model.layers.1.self_attn.{name.replace('__', '.')}": torch.tensor(value) for name, value in scales.items()
    }
    save_file({**tensors, "model.layers.1.self_attn.k_proj.weight": torch.zeros(2)}, folder / "model.safetensors")
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("scales", "k", "v"),
    [
        ({"k_proj__k_scale": 0.5, "v_proj__v_scale": 0.25}, 0.5, 0.25),
        ({"k_scale": [0.5], "v_scale": [0.25]}, 0.5, 0.25),
        ({"k_scale": [[[0.5]], [[0.5]]], "v_scale": [[[0.25]], [[0.25]]]}, 0.5, 0.25),
        ({"k_proj__output_scale": 0.5, "v_proj__output_scale": 0.25}, 0.5, 0.25),
        ({"kv_scale": 0.5}, 0.5, 0.5),
    ],
    ids=["modelopt", "compressed-tensors", "equal heads", "compressed-tensors before", "one for both"],
)
def test_scales_are_read_in_every_spelling(scales: dict[str, Any], k: float, v: float, tmp_path: Path) -> None:
    made = found(stored(tmp_path, **scales), "model", 3)
    assert made.of(3) == (UNSCALED, CacheScales(k, v), UNSCALED)
    assert sorted(made.names) == sorted(f"model.layers.1.self_attn.{name.replace('__', '.')}" for name in scales)


@pytest.mark.parametrize(
    ("scales", "sentence"),
    [
        ({"k_scale": [[[0.5]], [[0.25]]], "v_scale": 1.0}, "holds 2 scales"),
        ({"k_scale": 0.5}, "no counterpart for values"),
        ({"v_proj__v_scale": 0.5}, "no counterpart for keys"),
        ({"k_scale": 0.5, "kv_scale": 0.25}, "differ: keep one"),
        ({"k_scale": 0.0, "v_scale": 1.0}, "is 0.0, and a scale is above 0"),
        ({"k_scale": float("nan"), "v_scale": 1.0}, "k_scale is nan, and a scale is above 0"),
    ],
)
def test_scales_that_cannot_be_honoured_are_named(scales: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, **scales)
    with pytest.raises(WeightsError, match=sentence):
        found(checkpoint, "model", 2)
    assert found(checkpoint, "model", 2, used=False).names, "an unquantized cache has no use for them"


def test_scales_of_a_layer_that_is_not_there_are_left_to_the_loader(tmp_path: Path) -> None:
    checkpoint = stored(tmp_path, k_scale=0.5, v_scale=0.25)
    assert found(checkpoint, "model", 1).names == ()
