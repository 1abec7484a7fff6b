"""Cases of the ops that choose among kernels, from the numbers and options of a command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels.gated_mlp.cases import case as gated_mlp_case
from kernels.group_linear.cases import case as group_case
from kernels.latent_attention.cases import case as latent_case
from kernels.linear import cases as linear
from kernels.linear_norm.cases import case as linear_norm_case
from kernels.moe.cases import case as moe_case
from kernels.moe_gemm import cases as experts
from kernels.paged_attention.cases import SeqShape
from kernels.paged_attention.cases import case as paged_case
from kernels.registry import Case
from kernels.rope_attention.cases import case as rope_case
from kernels.weight import GgufBlocks
from kernels.weight.gguf import FORMATS, row_bytes
from kernels.weight.inputs import Inputs

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
GGUF = {name.lower(): name for name in FORMATS}
# int4: groups of 128. fp8: blocks of 128, inputs by 128. int8: both sides. fp4: MXFP4.
WEIGHTS = ("dense", "int4", "fp8", "int8", "fp4", "nvfp4", *GGUF)
_SQUARE, _GROUP = (128, 128), Inputs("fp8", 128)

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """shape: what its numbers are. case: from those and the options. options: adds them to the op's parser.
    deterministic: whether the op can be asked for batch-invariant arithmetic."""

    shape: tuple[str, ...]
    case: Callable[[Numbers, argparse.Namespace], Case]
    options: Callable[[argparse.ArgumentParser], None]
    deterministic: bool = True


def _linear_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weight", choices=WEIGHTS, default="dense")
    parser.add_argument("--activation", choices=["silu", "gelu_tanh"], help="OUTPUTS are those behind it")
    for name in ("norm", "bias", "residual"):
        parser.add_argument(f"--{name}", action="store_true")


def _linear(numbers: Numbers, args: argparse.Namespace) -> Case:
    rows, outputs, inputs = numbers
    names = ("norm", "bias", "residual", "activation")
    fused: dict[str, Any] = {name: getattr(args, name) for name in names}
    sizes = ("", DTYPES[args.dtype], rows, outputs, inputs)
    if args.weight == "fp8":
        return linear.fp8_case(*sizes, _SQUARE, _GROUP, **fused)
    if args.weight == "int8":
        return linear.int8_case(*sizes, Inputs("int8"), **fused)
    if args.weight == "int4":
        return linear.packed_case(*sizes, 4, 128, **fused)
    if args.weight in ("fp4", "nvfp4"):
        nv = args.weight == "nvfp4"
        return linear.fp4_case(*sizes, 16 if nv else 32, factors=nv, **fused)
    plain = linear.case(*sizes, **fused)
    return plain if args.weight == "dense" else _in_blocks(plain, GGUF[args.weight], "weight")


def _linear_norm_options(parser: argparse.ArgumentParser) -> None:
    """None of its own: the weight is dense."""


def _linear_norm(numbers: Numbers, args: argparse.Namespace) -> Case:
    rows, outputs, inputs = numbers
    return linear_norm_case("", DTYPES[args.dtype], rows, outputs, inputs)


def _gated_mlp_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weight", choices=("dense", "fp8"), default="dense")
    parser.add_argument("--limit", type=float, help="clips gate and up before the activation")
    for name in ("norm", "bias", "residual"):
        parser.add_argument(f"--{name}", action="store_true")


def _gated_mlp(numbers: Numbers, args: argparse.Namespace) -> Case:
    rows, hidden, inner = numbers
    fp8 = (_SQUARE, _GROUP) if args.weight == "fp8" else None
    fused: dict[str, Any] = {name: getattr(args, name) for name in ("norm", "bias", "residual", "limit")}
    return gated_mlp_case("", DTYPES[args.dtype], rows, hidden, inner, fp8=fp8, **fused)


def _group_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weight", choices=("dense", "fp8"), default="dense")


def _group_linear(numbers: Numbers, args: argparse.Namespace) -> Case:
    rows, groups, outputs, inputs = numbers
    return group_case("", DTYPES[args.dtype], rows, groups, inputs, outputs, fp8=args.weight == "fp8")


def _experts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weight", choices=WEIGHTS, default="dense")
    _moe_options(parser)


def _moe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--activation", choices=["silu", "gelu_tanh", "swiglu_oai"], default="silu")
    parser.add_argument("--residual", action="store_true")


def _moe_gemm(numbers: Numbers, args: argparse.Namespace) -> Case:
    given: dict[str, Any] = {"residual": args.residual, "activation": args.activation}
    tokens, hidden, inner, count, top = numbers
    sizes = ("", DTYPES[args.dtype], tokens, hidden, inner, count, top)
    if args.weight == "fp8":
        return experts.w8a8_case(*sizes, _GROUP, _SQUARE, **given)
    if args.weight == "int8":
        return experts.w8a8_case(*sizes, Inputs("int8"), whole=True, **given)
    if args.weight == "int4":
        return experts.packed_case(*sizes, group=128, **given)
    if args.weight in ("fp4", "nvfp4"):
        nv = args.weight == "nvfp4"
        return experts.fp4_case(*sizes, group=16 if nv else 32, factors=nv, **given)
    plain = experts.case(*sizes, **given)
    return plain if args.weight == "dense" else _in_blocks(plain, GGUF[args.weight], "gate_up", "down")


def _moe(numbers: Numbers, args: argparse.Namespace) -> Case:
    tokens, hidden, inner, count, top = numbers
    options: dict[str, Any] = {"residual": args.residual, "activation": args.activation, "norm": True, "narrow": True}
    return moe_case("", DTYPES[args.dtype], tokens, hidden, inner, count, top, **options)


def _sequences(singles: int, args: argparse.Namespace) -> list[SeqShape]:
    """The command line's sequences, those of one query first."""
    count, queries = args.longer
    return [(1, args.context)] * singles + [(queries, max(queries, args.context))] * count


def _pair(text: str) -> Numbers:
    count, queries = map(int, text.split("x"))
    return count, queries


def _common_attention(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence in the cache")
    parser.add_argument(
        "--longer", type=_pair, default=(0, 2), metavar="NxQUERIES", help="sequences of several queries"
    )
    parser.add_argument("--cache", choices=["same", "fp8"], default="same")
    parser.add_argument("--block-size", type=int, default=16)


def _attention_options(parser: argparse.ArgumentParser) -> None:
    _common_attention(parser)
    parser.add_argument("--window", type=int)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--sinks", action="store_true")


def _attention(make: Callable[..., Case]) -> Callable[[Numbers, argparse.Namespace], Case]:
    def case(numbers: Numbers, args: argparse.Namespace) -> Case:
        singles, heads, kv_heads, channels = numbers
        given: dict[str, Any] = {name: getattr(args, name) for name in ("block_size", "window", "softcap", "sinks")}
        given["scales"] = (0.1, 0.1) if args.cache == "fp8" else None
        return make("", DTYPES[args.dtype], _sequences(singles, args), heads, kv_heads, channels, **given)

    return case


def _latent_options(parser: argparse.ArgumentParser) -> None:
    _common_attention(parser)
    parser.add_argument("--absorbed", action="store_true", help="queries of longer sequences were absorbed")


def _latent(numbers: Numbers, args: argparse.Namespace) -> Case:
    """With DeepSeek-V2's latents of 512, rotated keys of 64, and heads of 128."""
    singles, heads = numbers
    scale = 0.1 if args.cache == "fp8" else None
    given: dict[str, Any] = {"block_size": args.block_size, "fp8_scale": scale, "expanded": not args.absorbed}
    return latent_case("", DTYPES[args.dtype], _sequences(singles, args), heads, 512, 64, 128, **given)


def _in_blocks(plain: Case, name: str, *weights: str) -> Case:
    """The case with blocks of zeros in the place of dense weights."""

    def make(device: torch.device, generator: torch.Generator) -> dict[str, Any]:
        given = plain.make(device, generator)
        for weight in weights:
            *rows, k = given[weight].shape
            data = torch.zeros(*rows, row_bytes(k, name), dtype=torch.uint8, device=device)
            given[weight] = GgufBlocks((data,), (name,), k)
        return given

    return replace(plain, make=make)


_EXPERTS = ("TOKENS", "HIDDEN", "INNER", "EXPERTS", "TOP_K")
_HEADS = ("SEQS", "HEADS", "KV_HEADS", "CHANNELS")
SUBJECTS = {
    "linear": Subject(("ROWS", "OUTPUTS", "INPUTS"), _linear, _linear_options),
    "linear_norm": Subject(("ROWS", "OUTPUTS", "INPUTS"), _linear_norm, _linear_norm_options, deterministic=False),
    "gated_mlp": Subject(("ROWS", "HIDDEN", "INNER"), _gated_mlp, _gated_mlp_options),
    "group_linear": Subject(("ROWS", "GROUPS", "OUTPUTS", "INPUTS"), _group_linear, _group_options),
    "moe_gemm": Subject(_EXPERTS, _moe_gemm, _experts_options),
    "moe": Subject(_EXPERTS, _moe, _moe_options),
    "paged_attention": Subject(_HEADS, _attention(paged_case), _attention_options),
    "rope_attention": Subject(_HEADS, _attention(rope_case), _attention_options),
    "latent_attention": Subject(("SEQS", "HEADS"), _latent, _latent_options),
}
