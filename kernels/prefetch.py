"""Asking for memory before it is read."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def prefetch(pointers):  # type: ignore[no-untyped-def]
    """Asks the L2 cache for the lines at `pointers`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.uint64, bitcast=True)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
