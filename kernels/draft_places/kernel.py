"""Places of all passes by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import cdiv
from kernels.workspace import Workspace

_BLOCK = 128
# Each pass's places begin on 16 bytes, or kernels that read them are compiled anew.
_ALIGNED = 4


@triton.jit(
    do_not_specialize=["B", "stride", "dummy"], do_not_specialize_on_alignment=["p_lengths", "p_counts", "p_rows"]
)
def _places(p_lengths, p_counts, p_rows, p_out, B, stride, dummy, BLOCK: tl.constexpr):
    """No kernel starts before this one ends: attention reads lengths ahead of its own wait."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    drafted = tl.program_id(1)
    held = entry < B
    count = tl.load(p_counts + entry, mask=held, other=0)
    wanted = drafted < count
    place = tl.load(p_lengths + entry, mask=held, other=0) - count - 1 + drafted
    place = tl.where(wanted, place, 1)
    row = tl.where(wanted, tl.load(p_rows + entry, mask=held, other=0), dummy)
    p_own, plane = p_out + drafted * stride + entry, tl.num_programs(1) * stride
    tl.store(p_own, row, mask=held)
    tl.store(p_own + plane, place - 1, mask=held)
    tl.store(p_own + 2 * plane, place, mask=held)
    tl.store(p_own + 3 * plane, tl.where(wanted, place + 1, 1), mask=held)


def draft_places(
    workspace: Workspace, lengths: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, depth: int, dummy: int
) -> torch.Tensor:
    """Row, place before the newest token, its place and the drafted one's, of each pass and entry. Shapes as in the
    reference."""
    entries = len(counts)
    stride = cdiv(entries, _ALIGNED) * _ALIGNED
    out = torch.empty((4, depth, stride), dtype=torch.int32, device=counts.device)
    if entries and depth:
        workspace.launch(_places, (cdiv(entries, _BLOCK), depth))(
            lengths, counts, rows, out, entries, stride, dummy, BLOCK=_BLOCK, num_warps=1
        )
    return out[..., :entries]
