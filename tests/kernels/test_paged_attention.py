"""The way for many queries, at sizes that the interpreter can take: real shapes take it on a GPU (test_ops)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.paged_attention.cases import case
from kernels.paged_attention.reference import paged_attention
from kernels.testing import TOLERANCES, assert_close, poisoned, seeded

LINES: dict[str, list[tuple[int, int]]] = {
    "one line": [(33, 33)],
    "a line with a past": [(40, 170)],
    "decode lines before": [(1, 20), (1, 131), (9, 9), (37, 150)],
    "padding": [(3, 3), (5, 0), (2, 129)],
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lines", LINES.values(), ids=LINES.keys())
@pytest.mark.parametrize("heads", [(4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("extras", [{}, {"softcap": 20.0, "sinks": True}], ids=["plain", "softcap, sinks"])
def test_gathered_keys_give_the_same(
    dtype: torch.dtype,
    lines: list[tuple[int, int]],
    heads: tuple[int, int],
    extras: dict[str, Any],
    device: torch.device,
) -> None:
    from kernels.paged_attention.long import attend_long

    inputs = case("", dtype, lines, *heads, 64, strided=True, **extras).make(device, seeded(device))
    want = paged_attention(**inputs)
    single, longest = inputs["num_single"], max(context for _, context in lines)
    out = torch.full_like(want, float("nan"))
    names = ("q", "k_cache", "v_cache", "block_table", "query_start", "context_len")
    with poisoned():
        attend_long(
            *(inputs[name] for name in names),
            out,
            inputs["scale"],
            single,
            len(lines) - single,
            len(want) - single,
            longest,
            inputs["softcap"],
            inputs["sinks"],
        )
    assert_close("queries of many", out[single:], want[single:], TOLERANCES[dtype])
