"""Checkpoints of random numbers with a published shape, as bytes on disk: what loading is measured with.

    python -m perf.checkpoints FOLDER SHAPE [SHAPE:QUANTIZATION …] [--gb 2] [--vocab 4096]

A shape is one of `perf.shapes`, or a folder or file with a published config; a quantization is of
`perf.shapes.QUANTIZATIONS`, or "q4_k", a GGUF file (qwen3 and llama). Layers are as many as fit into --gb, and the
vocabulary is cut, so that what is measured is layers. Tensors are those that the family's rules name, in the format
that the config says. Their numbers are drawn once and repeated, each tensor's from a place of its own. Norms are one,
and numbers times scales have the size of weights, so that a model computes with them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from engine.gguf_file import FORMATS
from engine.layers.build_context import BuildContext
from engine.models import registry
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.gguf import names as gguf_names
from engine.models.parts import with_shared_apart
from engine.quant import plan as quant
from engine.quant.formats import fp4, layouts
from engine.quant.method import Method
from engine.quant.scheme import Fp4Scheme, Fp8Scheme, Int8Scheme, PackedScheme, Scheme
from engine.weights.checkpoint import DTYPES
from engine.weights.rules import Rule
from kernels.select import select
from kernels.sizes import cdiv
from kernels.workspace import Workspace
from perf import shapes

Shape = tuple[int, ...]
GGUF, BLOCK_BYTES = "q4_k", 144
# Numbers that are drawn, of which every tensor is a repetition.
DRAWN = 1 << 23
# Standard deviations of weights, and of 8-bit floats before their scales.
STD, FP8_STD = 0.02, 100.0
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor that a checkpoint holds. values: its numbers, where they are not random."""

    dtype: torch.dtype
    shape: Shape
    values: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


Tensors = dict[str, Stored]


def write(
    folder: Path,
    shape: str,
    gb: float = 2.0,
    vocab: int = 4096,
    layers: int | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Writes a checkpoint of `shape`, or of SHAPE:QUANTIZATION, into a folder of `folder`; returns it.

    `layers` is how many there are; None: as many as fit into `gb` 10⁹ bytes, one at least. `values` are numbers of
    tensors that are not random, by name.

    Raises ValueError for what no layout is known of here.
    """
    name, _, quantization = shape.partition(":")
    blocks = quantization == GGUF
    said = None if blocks else quantization or None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as drafts:

        def made(count: int) -> Path:
            return shapes.write(Path(drafts), name, count, quantization=said, vocab=vocab)

        if layers is None:
            one, two = (_size(made(count), blocks) for count in (1, 2))
            layers = 1 + max(0, int((gb * 1e9 - one) // (two - one)))
            layers = min(layers, shapes.config_of(name)["num_hidden_layers"])
        draft = made(layers)
        tensors = tensors_of(draft)
        tensors |= {name: replace(tensors[name], values=given) for name, given in (values or {}).items()}
        if blocks:
            _write_gguf(draft / "model.gguf", tensors, registry.values(draft))
        else:
            write_safetensors(draft, tensors)
        target = folder / (f"{draft.name}-{GGUF}" if blocks else draft.name)
        shutil.rmtree(target, ignore_errors=True)
        return draft.rename(target)


def ruled(folder: Path) -> tuple[ModelConfig, registry.Family, Method | None, list[Rule]]:
    """The folder's config.json as an engine takes it: the model, its family, how it is quantized, its rules."""
    model, family = registry.load(folder)
    method = registry.quantization(folder)
    rules = family.rules(model)
    if quant.shared_apart(rules, None, method):
        model = with_shared_apart(model)
        rules = family.rules(model)
    return model, family, method, rules


def tensors_of(folder: Path) -> Tensors:
    """What a checkpoint of the folder's config.json holds, by the names that the family's rules know."""
    model, family, method, rules = ruled(folder)
    cpu = torch.device("cpu")
    decoder = Decoder(BuildContext(select(Workspace(cpu)), model, torch.bfloat16, cpu, 8))
    made: Tensors = {}
    for rule in rules:
        weight = decoder.weights.get(rule.target)
        quantized = weight is not None and rule.target not in quant.OUTER
        target = decoder.get_parameter(rule.target) if weight is None else torch.empty(weight.shape, device="meta")
        bound = decoder.bounds.get(rule.target)
        for source, shape in _sources(rule, target):
            module = source.removesuffix(".weight")
            scheme = method.scheme(module) if quantized and method is not None else None
            if scheme is not None:
                made |= {f"{module}.{end}": held for end, held in _packed(scheme, shape).items()}
            elif bound is not None:
                ids = (torch.arange(prod(shape)) % bound).view(shape)
                made[source] = Stored(torch.int64, shape, ids)
            else:
                norm = len(shape) == 1 and not source.endswith("bias")
                made[source] = Stored(torch.bfloat16, shape, torch.ones(shape) if norm else None)
    return _stacked(made) if hasattr(family, "unstack") else made


def _size(folder: Path, blocks: bool) -> int:
    return sum(_gguf_type(held)[1] if blocks else held.num_bytes for held in tensors_of(folder).values())


def _sources(rule: Rule, target: torch.Tensor) -> Iterator[tuple[str, Shape]]:
    """Each source, and the shape that its view has."""
    for source, view in zip(rule.sources, rule.combine(target, [()] * len(rule.sources)), strict=True):
        parts = [view] if isinstance(view, torch.Tensor) else view
        rows, *rest = sum(len(part) for part in parts), *parts[0].shape[1:]
        # A view of a dimension more takes a matrix's rows in runs; one of a transform says what it makes.
        wide = len(rest) == 2 and rule.transform is None
        yield source, (rows, prod(rest)) if wide else (rows, *rest)


def _packed(scheme: Scheme, shape: Shape) -> Tensors:
    """The tensors of a projection [N, K], by the ends of their names."""
    n, k = shape
    if isinstance(scheme, Fp8Scheme):
        data = {"weight": Stored(torch.float8_e4m3fn, shape)}
        n_block, k_block = scheme.block or (1, k)
        scales = torch.full((cdiv(n, n_block), cdiv(k, k_block)), STD / FP8_STD)
        name, dtype = "weight_scale_inv", torch.float32
        if scheme.block is None:
            name, dtype = "weight_scale", torch.bfloat16
        elif scheme.power_of_two:
            name, dtype = "scale", torch.float8_e8m0fnu
        return {**data, name: Stored(dtype, tuple(scales.shape), scales)}
    if isinstance(scheme, Int8Scheme):
        return {"weight": Stored(torch.int8, shape), "weight_scale": Stored(torch.bfloat16, (n, 1))}
    if isinstance(scheme, Fp4Scheme):
        names = fp4.NAMES[scheme.layout]
        if names.factor is not None:
            raise ValueError(f"checkpoints of {scheme.layout} are not made here")
        own = scheme.layout == "scale"
        data_dtype, scale_dtype = (torch.int8, torch.float8_e8m0fnu) if own else (torch.uint8, torch.uint8)
        return {
            names.data: Stored(data_dtype, (n, k // 2)),
            names.scale: Stored(scale_dtype, (n, k // names.group)),
        }
    if isinstance(scheme, PackedScheme):
        return _words(scheme, n, k)
    raise ValueError(f"checkpoints of {type(scheme).__name__} are not made here")


def _words(scheme: PackedScheme, n: int, k: int) -> Tensors:
    names, per, groups = layouts.NAMES[scheme.layout], 32 // scheme.bits, cdiv(k, scheme.group or k)
    if scheme.layout == "pack-quantized":
        made = {
            names.data: Stored(torch.int32, (n, cdiv(k, per))),
            names.scale: Stored(torch.bfloat16, (n, groups)),
            "weight_shape": Stored(torch.int64, (2,), torch.tensor([n, k])),
        }
        zeros = (cdiv(n, per), groups)
    else:
        data = (k, cdiv(n, per)) if scheme.layout == "awq" else (cdiv(k, per), n)
        made = {names.data: Stored(torch.int32, data), names.scale: Stored(torch.float16, (groups, n))}
        zeros = (groups, cdiv(n, per))
    if scheme.zeros:
        made[names.zero] = Stored(torch.int32, zeros)
    if scheme.layout == "gptq" or scheme.ordered:
        assert names.order is not None
        order = torch.arange(k) // (scheme.group or k)
        if scheme.ordered:
            # Matrices of as many inputs have the same, as those of one product must.
            order = order[torch.randperm(k, generator=torch.Generator().manual_seed(k))]
        made[names.order] = Stored(torch.int32, (k,), order)
    return made


def _stacked(tensors: Tensors) -> Tensors:
    """One tensor for all experts of a layer, whose gates and ups alternate, as gpt-oss has them in 4 bits."""
    made: Tensors = {}
    ends = {"weight_packed": "blocks", "weight_scale": "scales"}
    experts = [name for name in tensors if ".experts." in name and name.rpartition(".")[2] in ends]
    for name, held in tensors.items():
        if name not in experts:
            made[name] = held
            continue
        layer, _, rest = name.partition(".experts.")
        number, part, end = rest.split(".")
        if number != "0" or part == "up_proj":
            continue
        count = sum(other.startswith(f"{layer}.experts.") and other.endswith(f".{part}.{end}") for other in experts)
        (n, width), gates = held.shape, part == "gate_proj"
        rows = (count, 2 * n if gates else n)
        shape = (*rows, width // 16, 16) if end == "weight_packed" else (*rows, width)
        made[f"{layer}.experts.{'gate_up_proj' if gates else part}_{ends[end]}"] = Stored(torch.uint8, shape)
    return made


class _Drawn:
    """Random numbers of every dtype, in pieces of a tensor's bytes."""

    def __init__(self) -> None:
        normal = torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)) * STD
        self._kept: dict[torch.dtype, memoryview] = {}
        self._blocks: memoryview | None = None
        self._makers: dict[torch.dtype, Callable[[], torch.Tensor]] = {
            torch.float8_e4m3fn: lambda: (normal / STD * FP8_STD).clamp(-448, 448),
            # Of exponents near zero, whose dtype converts nothing here.
            torch.float8_e8m0fnu: lambda: (120 + (normal * 100).abs()).to(torch.uint8).view(torch.float8_e8m0fnu),
        }
        self._floats = lambda: normal
        self._bytes = lambda: torch.randint(0, 256, (DRAWN,), dtype=torch.uint8)

    def pieces(self, name: str, held: Stored) -> Iterator[memoryview]:
        if held.values is not None:
            yield _raw(held.values.to(held.dtype))
            return
        kept = self._kept.get(held.dtype)
        if kept is None:
            whole = held.dtype.itemsize if not held.dtype.is_floating_point else 0
            maker = self._makers.get(held.dtype, self._bytes if whole else self._floats)
            made = maker()
            kept = self._kept[held.dtype] = _raw(made if whole else made.to(held.dtype))
        yield from _repeated(kept, held.num_bytes, _place(name, 16, len(kept)))

    def blocks(self, name: str, size: int) -> Iterator[memoryview]:
        """Blocks of GGUF in so many bytes, whose scales and offsets, two float16, give weights of the usual size."""
        if self._blocks is None:
            made = self._bytes()[: DRAWN // BLOCK_BYTES * BLOCK_BYTES].view(-1, BLOCK_BYTES)
            made[:, :4] = torch.full((2,), 5e-5, dtype=torch.float16).view(torch.uint8)
            self._blocks = _raw(made)
        yield from _repeated(self._blocks, size, _place(name, BLOCK_BYTES, len(self._blocks)))


def _place(name: str, unit: int, size: int) -> int:
    """Where a tensor's numbers begin in `size` bytes: a multiple of `unit`."""
    return zlib.crc32(name.encode()) % (size // unit) * unit


def _repeated(kept: memoryview, size: int, start: int) -> Iterator[memoryview]:
    while size:
        piece = kept[start : start + size]
        yield piece
        size, start = size - len(piece), 0


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).flatten().numpy().data


def write_safetensors(folder: Path, tensors: Tensors) -> None:
    """Files of these tensors with an index: one for each layer, and one for the rest."""
    parts: dict[str, Tensors] = {}
    for name, held in sorted(tensors.items()):
        _, found, rest = name.partition("layers.")
        parts.setdefault(f"layer-{rest.split('.')[0]}" if found else "outer", {})[name] = held
    drawn, placed = _Drawn(), {}
    for part, named in parts.items():
        file, at = f"model-{part}.safetensors", 0
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for name, held in named.items():
            end = at + held.num_bytes
            header[name] = {"dtype": NAMES[held.dtype], "shape": held.shape, "data_offsets": [at, end]}
            placed[name], at = file, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for name, held in named.items():
                stream.writelines(drawn.pieces(name, held))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


def _gguf_type(held: Stored) -> tuple[int, int]:
    """The number of the tensor's type in a file, and its bytes: matrices are blocks, the rest float32."""
    number = next(n for n, form in FORMATS.items() if form.name == (GGUF.upper() if len(held.shape) > 1 else "F32"))
    form = FORMATS[number]
    return number, prod(held.shape) // form.num_values * form.num_bytes


def _write_gguf(file: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Version 3, with no more metadata than the reader of tensors asks for (ggml's docs/gguf.md)."""
    arch = config["model_type"]
    layout = {**gguf_names.LAYER, **(gguf_names.HEAD_NORMS if arch == "qwen3" else {})}
    if arch not in ("llama", "qwen3"):
        raise ValueError(f"GGUF files of {arch} are not made here")
    ours = {theirs: name for name, theirs in layout.items()}
    outer = {theirs: name for name, theirs in gguf_names.OUTER.items()}

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    heads = {"head_count": config["num_attention_heads"], "head_count_kv": config["num_key_value_heads"]}
    keys = [text("general.architecture") + struct.pack("<I", 8) + text(arch)]
    keys += [text(f"{arch}.attention.{key}") + struct.pack("<II", 4, value) for key, value in heads.items()]
    infos, at = [], 0
    for name, held in tensors.items():
        module, _, end = name.rpartition(".")
        _, layer, rest = module.partition("layers.")
        number, _, part = rest.partition(".")
        label = f"blk.{number}.{ours[part]}.{end}" if layer else f"{outer[module]}.{end}"
        kind, size = _gguf_type(held)
        dims = held.shape[::-1]
        infos.append(text(label) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, at))
        at += size + -size % 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(keys)) + b"".join(keys + infos)
    drawn = _Drawn()
    with file.open("wb") as stream:
        stream.write(head + bytes(-len(head) % 32))
        for name, held in tensors.items():
            kind, size = _gguf_type(held)
            plain = FORMATS[kind].num_values == 1
            wide = replace(held, dtype=torch.float32)
            pieces = drawn.pieces(name, wide) if plain else drawn.blocks(name, size)
            stream.writelines([*pieces, bytes(-size % 32)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help="SHAPE or SHAPE:QUANTIZATION, as above")
    parser.add_argument("--gb", type=float, default=2.0, help="10⁹ bytes that layers are made for")
    parser.add_argument("--vocab", type=int, default=4096, help="tokens that are kept")
    args = parser.parse_args()
    for shape in args.shapes:
        print(write(args.folder, shape, args.gb, args.vocab))


if __name__ == "__main__":
    main()
