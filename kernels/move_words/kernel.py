"""Moves words between pinned host memory and the device by one Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.sizes import cdiv
from kernels.workspace import Workspace

_BLOCK = 1024


@triton.jit(
    do_not_specialize=["n", "p", "copying"],
    do_not_specialize_on_alignment=["p_source", "p_target", "p_changes", "p_table"],
)
def _move(p_source, p_target, p_changes, p_table, n, p, copying, BLOCK: tl.constexpr):
    """The first `copying` programs take BLOCK words of the source each, the others as many changes."""
    program = tl.program_id(0)
    if program < copying:
        word = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        tl.store(p_target + word, tl.load(p_source + word, mask=word < n, other=0), mask=word < n)
    else:
        change = (program - copying).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        word = tl.load(p_changes + change, mask=change < p, other=0).to(tl.int64)
        tl.store(p_table + word, tl.load(p_changes + p + change, mask=change < p, other=0), mask=change < p)


def move_words(
    workspace: Workspace,
    source: torch.Tensor,
    target: torch.Tensor,
    changes: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
) -> None:
    """target = source, and table[changes[0]] = changes[1]. Shapes as in the reference.

    A copy engine takes turns with the multiprocessors: a step would wait 7 to 9 µs for each of its two copies. Threads
    reach pinned memory themselves.
    """
    n, p = len(source), 0 if changes is None else changes.shape[1]
    copying = cdiv(n, _BLOCK)
    programs = copying + cdiv(p, _BLOCK)
    if programs:
        changes, table = (target if of is None else of for of in (changes, table))
        workspace.launch(_move, (programs,))(source, target, changes, table, n, p, copying, BLOCK=_BLOCK, num_warps=4)
