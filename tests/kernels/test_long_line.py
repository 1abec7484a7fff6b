"""The library path of attention: merged parts equal one pass, for a fresh prompt and behind a cached prefix."""

from __future__ import annotations

import pytest
import torch

from kernels.paged_attention.reference import paged_attention


@pytest.mark.parametrize(("queries", "length"), [(33, 33), (5, 40), (17, 64)])
def test_a_long_line_equals_the_reference(queries: int, length: int, device: torch.device) -> None:
    from kernels.paged_attention import library  # bound to the interpreter or not when it is imported

    generator = torch.Generator().manual_seed(queries)
    heads, groups, d, size = 4, 2, 64, 16
    k, v = (torch.randn(9, groups, size, d, generator=generator).bfloat16().to(device) for _ in range(2))
    q = torch.randn(queries, heads, d, generator=generator).bfloat16().to(device)
    table = torch.tensor([[7, 2, 5, 1]], dtype=torch.int32, device=device)
    start, context = torch.tensor([0, queries], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    want = paged_attention(q, k, v, table, start.to(device), context.to(device), 0.125, 0, queries, length)
    got = library.long_line(q, k, v, table, context.to(device), 0, length, 0.125)
    assert torch.allclose(got.float(), want.float(), atol=2e-2)
    if queries == length:
        return
    # a wrong border between the two parts shows
    late = library.long_line(q, k, v, table, context.to(device) - 1, 0, length - 1, 0.125)
    assert not torch.allclose(late.float(), want.float(), atol=2e-2)
