"""Quantized checkpoints of the gate's shapes, packed by code written from each format's definition, and what
transformers says of their dequantized weights.

A packing gives, for a projection's matrix, the tensors that a checkpoint holds and the numbers that these stand for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.gate import fp4, fp8, integers
from tests.gate.fp4 import MODELOPT, MODELOPT_INPUTS, fp4_config, mxfp4, nvfp4
from tests.gate.fp8 import (
    BLOCKS,
    FBGEMM,
    MIXED,
    PARTS,
    float_quantized,
    fp8_blocks,
    fp8_rows,
    fp8_tensor,
    mixed_pack,
    mixed_packs,
    modelopt,
    mxfp8,
    mxfp8_config,
    part_pack,
)
from tests.gate.integers import (
    awq,
    awq_config,
    compressed,
    gptq,
    gptq_config,
    int4_bytes,
    int8_rows,
    int8_tensor,
    int_quantized,
    matching,
    pack_quantized,
    w4afp8,
    with_inputs,
)
from tests.gate.oracle import FORCED, Golden, Sequence
from tests.gate.shapes import Shape

Tensors = dict[str, torch.Tensor]
# Of the gate's sequences every so many.
STEP = 4
PROJECTIONS = ("_proj.weight", "_proj_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
PROJECTIONS += tuple(f".{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wgate", "wo_a", "wo_b"))
PROJECTIONS += tuple(f".in_proj_{name}.weight" for name in ("qkv", "z", "a", "b"))
# Tables of experts [E, inputs, outputs], as gpt-oss stores them.
TABLES = (".experts.gate_up_proj", ".experts.down_proj")


def as_published(module: str) -> bool:
    """What has as many outputs as there are heads is left as it is."""
    return not module.endswith(("in_proj_a", "in_proj_b"))


@dataclass(frozen=True)
class Packing:
    """pack(matrix [N, K] float32) → the tensors by the end of their names, and the numbers that they stand for.

    config is the checkpoint's quantization_config, if it has one, beside what else stands in its config; quantize is
    `weights.quantize`. packs says by the module's name whether it is quantized, and other what packs it in place of
    `pack`. named: what the checkpoint calls a tensor. quick: the shapes that the suite plays it on; None: all dense
    ones.
    """

    name: str
    config: dict[str, Any] | None = field(hash=False)
    pack: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]] = field(hash=False)
    packs: Callable[[str], bool] = field(hash=False, default=as_published)
    other: Callable[[str], integers.Pack | None] = field(hash=False, default=lambda module: None)
    named: Callable[[str], str] = field(hash=False, default=lambda name: name)
    beside: dict[str, Any] = field(hash=False, default_factory=dict)
    quick: tuple[str, ...] | None = None
    quantize: Literal["fp8", "int8", "int4"] | None = None


def packed_golden(shape: Shape, base: Golden, packing: Packing, cache: Path) -> Golden:
    """A folder of `base`'s checkpoint packed so, and what transformers says in float32 of the numbers it stands for, to
    some of base's sequences. Made once and kept, as `golden` is."""
    source = json.dumps(asdict(shape), sort_keys=True) + packing.name + json.dumps(packing.config, sort_keys=True)
    code = b"".join(Path(str(file)).read_bytes() for file in (__file__, fp4.__file__, fp8.__file__, integers.__file__))
    digest = hashlib.sha256(source.encode() + code).hexdigest()[:12]
    folder = cache / f"{shape.name}-{packing.name}-{digest}"
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=cache) as made:
            _make(base, packing, Path(made))
            try:
                Path(made).rename(folder)
            except OSError:
                assert folder.exists()  # another process was first
    with np.load(folder / "logprobs.npz") as file:
        kept = [
            Sequence(sequence.prompt, sequence.forced, {"float32": file[str(i)], "bfloat16": file[str(i)]})
            for i, sequence in enumerate(base.sequences[::STEP])
        ]
    return Golden(folder, kept, kept[-1])


def tensors_of(base: Golden, packing: Packing) -> tuple[Tensors, Tensors]:
    """What the packed checkpoint holds, and what it stands for, both by their names in transformers' checkpoint."""
    plain: Tensors = {}
    packed: Tensors = {}
    for file in sorted(base.folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            module = name.removesuffix(".weight")
            if tensor.dim() == 2 and name.endswith(PROJECTIONS) and packing.packs(module):
                tensors, numbers = (packing.other(module) or packing.pack)(tensor.float())
                packed |= {f"{module}.{end}": part.contiguous() for end, part in tensors.items()}
                plain[name] = numbers.contiguous()
            elif name.endswith(TABLES) and packing.quantize is not None:
                packed[name] = tensor
                plain[name] = torch.stack([packing.pack(matrix.T.float())[1].T for matrix in tensor])
            else:
                packed[name], plain[name] = tensor, tensor.float() if tensor.is_floating_point() else tensor
    return packed, plain


def model_of(base: Golden, plain: Tensors) -> Any:
    """transformers' model of base's config with these tensors, in float32."""
    import transformers

    config = json.loads((base.folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        save_file(plain, Path(folder) / "model.safetensors", metadata={"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        architecture = getattr(transformers, config["architectures"][0])
        return architecture.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def said(model: Any, sequence: Sequence) -> np.ndarray:
    """The model's log-probabilities at the sequence's forced positions."""
    with torch.inference_mode():
        tokens = torch.tensor([[*sequence.prompt, *sequence.forced]])
        logits = model(tokens, logits_to_keep=FORCED + 1).logits[0]
    return np.asarray(logits.float().log_softmax(-1).numpy())


def _make(base: Golden, packing: Packing, folder: Path) -> None:
    packed, plain = tensors_of(base, packing)
    model = model_of(base, plain)
    logprobs = {str(i): said(model, sequence) for i, sequence in enumerate(base.sequences[::STEP])}
    np.savez_compressed(folder / "logprobs.npz", **logprobs)
    config = json.loads((base.folder / "config.json").read_text())
    stored = {packing.named(name): tensor for name, tensor in packed.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    how = {} if packing.config is None else {"quantization_config": packing.config}
    (folder / "config.json").write_text(json.dumps({**config, **how, **packing.beside}))
    for file in base.folder.glob("generation_config.json"):
        shutil.copy(file, folder)


def quantized_by_v4(module: str) -> bool:
    return ".compressor." not in module and not module.endswith("weights_proj")


def named_by_v4(name: str) -> str:
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace("lm_head.", "head.")


def as_rounded(module: str) -> bool:
    """What is read as dense numbers alone stays as it is."""
    return not module.endswith(("kv_b_proj", "wo_a"))


def whole_groups(module: str) -> bool:
    """Experts of the shapes have 48 channels, which are no whole groups of 32 inputs."""
    return not (".experts." in module and module.endswith("down_proj"))


PACKINGS = (
    Packing("fp8-blocks-f32", BLOCKS, fp8_blocks(torch.float32), quick=("qwen3", "llama3-wide", "qwen3-moe-wide")),
    Packing("fp8-blocks-bf16", BLOCKS, fp8_blocks(torch.bfloat16)),
    Packing("fp8-rows", {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_rows),
    Packing("fp8-tensor-static", {"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    Packing("ct-fp8-rows", float_quantized("channel", strategy="token", dynamic=True), fp8_rows),
    Packing("ct-fp8-tensor-static", float_quantized("tensor", strategy="tensor", dynamic=False), fp8_tensor),
    Packing(
        "ct-fp8-blocks",
        float_quantized("block", strategy="group", group_size=128, dynamic=True),
        fp8_blocks(torch.bfloat16, "weight_scale"),
    ),
    Packing("ct-mxfp8", mxfp8_config(), mxfp8, quick=("qwen3",)),
    Packing("ct-mxfp8-inputs", mxfp8_config(inputs=True), mxfp8, quick=()),
    Packing("modelopt-mxfp8", modelopt("MXFP8", group_size=32), mxfp8, quick=()),
    Packing("modelopt-fp8-pb-wo", modelopt("fp8_pb_wo"), fp8_blocks(torch.float32, "weight_scale", True), quick=()),
    Packing("fbgemm-fp8", FBGEMM, fp8_rows, quick=()),
    Packing("modelopt-mixed", MIXED, fp8_rows, mixed_packs, mixed_pack, quick=("qwen3",)),
    Packing("ct-parts", PARTS, pack_quantized(4, 64), lambda m: not m.endswith("v_proj"), part_pack, quick=("qwen3",)),
    Packing("ct-mxfp4", fp4_config("mxfp4-pack-quantized"), mxfp4(), whole_groups, quick=()),
    Packing("ct-nvfp4", fp4_config("nvfp4-pack-quantized"), nvfp4(), quick=("qwen3",)),
    Packing("modelopt-nvfp4", MODELOPT, nvfp4(modelopt=True), quick=()),
    Packing("ct-mxfp4-inputs", fp4_config("mxfp4-pack-quantized", inputs=True), mxfp4(), whole_groups, quick=()),
    Packing("ct-nvfp4-inputs", fp4_config("nvfp4-pack-quantized", inputs=True), nvfp4(inputs=True), quick=("qwen3",)),
    Packing("modelopt-nvfp4-inputs", MODELOPT_INPUTS, nvfp4(modelopt=True, inputs=True), quick=()),
    Packing("ct-int4-g32", compressed(4, 32), pack_quantized(4, 32), quick=()),
    Packing(
        "ct-int4-zeros-order",
        compressed(4, 32, False, "group"),
        pack_quantized(4, 32, zeros=True, ordered=True),
        quick=(),
    ),
    Packing("ct-int8-channel", compressed(8, 0), pack_quantized(8, 0), quick=()),
    Packing("ct-int8-g128-zeros", compressed(8, 128, False, "weight"), pack_quantized(8, 128, zeros=True), quick=()),
    Packing(
        "ct-int4-experts",
        compressed(4, 32, ignore=integers.KIMI_IGNORES),
        pack_quantized(4, 32),
        packs=lambda module: ".mlp.experts." in module,
        quick=(),
    ),
    Packing(
        "ct-mixed",
        {
            **compressed(4, 64, format="mixed-precision"),
            "config_groups": {
                "group_0": {**compressed(4, 64)["config_groups"]["group_0"], "format": "pack-quantized"},
                "group_1": {
                    **float_quantized("channel", strategy="token", dynamic=True)["config_groups"]["group_0"],
                    "targets": [r"re:.*self_attn.*"],
                    "format": "float-quantized",
                },
            },
        },
        pack_quantized(4, 64),
        other=matching(r".*self_attn", fp8_rows),
        quick=(),
    ),
    Packing("ct-w8a8", int_quantized("channel", strategy="token", dynamic=True), int8_rows, quick=("qwen3",)),
    Packing("ct-w8a8-static", int_quantized("tensor", strategy="tensor", dynamic=False), int8_tensor, quick=()),
    Packing("ct-int8-weights", int_quantized("channel"), int8_rows, quick=()),
    Packing("ct-w4a8", with_inputs(compressed(4, 32, format="int-quantized"), "int"), int4_bytes(32), quick=("qwen3",)),
    Packing("ct-w4afp8", with_inputs(compressed(4, 32), "float"), pack_quantized(4, 32), quick=()),
    Packing(
        "w4afp8",
        {"quant_method": "w4afp8"},
        fp8_blocks(torch.float32),
        other=matching(r".*\.experts\.", w4afp8),
        quick=("qwen3-moe",),
    ),
    Packing(
        "as-v4-is-published",
        {**BLOCKS, "scale_fmt": "ue8m0"},
        fp8_blocks(torch.float8_e8m0fnu, "scale"),
        packs=quantized_by_v4,
        other=matching(r".*\.ffn\.experts\.", mxfp4("weight", "scale", named=True)),
        named=named_by_v4,
        beside={"expert_dtype": "fp4"},
        quick=("deepseek-v4-blocks",),
    ),
    Packing("awq", awq_config(16), awq(16), quick=("qwen3",)),
    Packing(
        "awq-some",
        awq_config(32, modules_to_not_convert=["down_proj", "layers.1.self_attn"]),
        awq(32),
        packs=lambda module: "down_proj" not in module and "layers.1.self_attn" not in module,
        quick=(),
    ),
    Packing(
        "awq-half",
        awq_config(32, modules_to_not_convert=["kv_a_proj_with_mqa", "k_proj", "up_proj"]),
        awq(32),
        packs=lambda module: not module.endswith(("kv_a_proj_with_mqa", "k_proj", "up_proj")),
        quick=(),
    ),
    Packing("gptq-v1", gptq_config(4, 32, sym=True), gptq(4, 32, zeros=False), quick=()),
    Packing("gptq-v1-order", gptq_config(4, 32, True), gptq(4, 32, ordered=True), quick=("qwen3",)),
    Packing(
        "gptq-v2-8-order", gptq_config(8, 64, True, checkpoint_format="gptq_v2"), gptq(8, 64, 0, ordered=True), quick=()
    ),
    Packing("gptq-v1-8-channel", gptq_config(8, 0, True), gptq(8, 0), quick=()),
    Packing(
        "gptq-dynamic",
        gptq_config(4, 32, dynamic={r"-:.*\.1\.self_attn": {}, r"+:.*down_proj": {"bits": 8, "group_size": 16}}),
        gptq(4, 32),
        packs=lambda module: ".1.self_attn" not in module,
        other=matching(".*down_proj", gptq(8, 16)),
        quick=(),
    ),
    *(
        Packing(f"to-{kind}", None, integers.rounded_to(kind), as_rounded, quick=quick, quantize=kind)
        for kind, quick in (("fp8", ()), ("int8", ()), ("int4", ("qwen3",)))
    ),
)
