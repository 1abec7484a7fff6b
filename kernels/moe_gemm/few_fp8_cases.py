"""Few pairs of experts of 8-bit floats, which a kernel on Hopper takes with their inputs as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kernels.registry import Case
from kernels.weight.inputs import Inputs


def chosen_twice(case: Case) -> Case:
    """With a token's second expert the same as its first."""

    def make(device: torch.device, g: torch.Generator) -> dict[str, Any]:
        given = case.make(device, g)
        given["experts"][:, 1] = given["experts"][:, 0]
        return given

    return replace(case, make=make)


def few_fp8_cases(w8a8_case: Callable[..., Case]) -> list[Case]:
    """w8a8_case: `kernels.moe_gemm.cases.w8a8_case`."""
    bf16, square = torch.bfloat16, (128, 128)
    group, row, power = Inputs("fp8", 128), Inputs("fp8"), Inputs("fp8", 128, True)
    clipped, given = Inputs("fp8", largest=1.5), Inputs("fp8", scale=torch.tensor(0.01))
    oai: dict[str, Any] = {"activation": "swiglu_oai", "limit": 1.0, "biased": True}
    return [
        w8a8_case("few fp8 pairs: one", bf16, 1, 320, 192, 3, 1, group, square, residual=True),
        w8a8_case(
            "few fp8 pairs: one, fewer inputs than a block", bf16, 1, 64, 704, 3, 1, group, square, residual=True
        ),
        w8a8_case("few fp8 pairs: two, powers of two", bf16, 1, 192, 320, 5, 2, power, square, limit=0.5),
        w8a8_case("few fp8 pairs: three, biases, swiglu_oai", bf16, 1, 448, 64, 5, 3, group, square, **oai),
        chosen_twice(w8a8_case("few fp8 pairs: eight, an expert twice", bf16, 2, 256, 704, 6, 4, group, square)),
        w8a8_case("few fp8 pairs: 32 of eight experts", bf16, 4, 384, 256, 8, 8, group, square, residual=True),
        w8a8_case(
            "few fp8 pairs: experts that live elsewhere",
            bf16,
            3,
            320,
            960,
            3,
            4,
            group,
            square,
            absent=5,
            residual=True,
        ),
        w8a8_case("few fp8 pairs: blocks of rows", bf16, 3, 320, 704, 5, 3, group, (1, 128), activation="gelu_tanh"),
        w8a8_case("few fp8 pairs: blocks of 48 rows", bf16, 2, 192, 960, 5, 3, group, (48, 128)),
        w8a8_case("few fp8 pairs: rows", bf16, 5, 320, 192, 6, 4, row, residual=True, biased=True),
        w8a8_case("few fp8 pairs: rows, clipped inputs", bf16, 3, 192, 704, 5, 3, clipped, residual=True),
        w8a8_case(
            "few fp8 pairs: rows, a given scale of inputs", bf16, 2, 192, 960, 5, 3, given, absent=1, residual=True
        ),
        w8a8_case(
            "few fp8 pairs: inputs by rows, weights in blocks", bf16, 2, 320, 704, 5, 3, row, square, residual=True
        ),
        # rings that are filled several times; on a GPU of 132 multiprocessors no program shares a tile of the last
        w8a8_case("few fp8 pairs: many inputs", bf16, 1, 7232, 192, 4, 2, group, square, small=False),
        w8a8_case("few fp8 pairs: many outputs", bf16, 4, 4160, 2112, 8, 8, group, square, absent=2, small=False),
    ]
