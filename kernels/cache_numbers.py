# mypy: disable-error-code="no-untyped-def"
"""`kernels.cache_scales.stored` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)


@triton.jit
def to_cache(x, inverse, DTYPE: tl.constexpr):
    """x as a cache of DTYPE keeps it, `inverse` being 1 over the scale."""
    if DTYPE == tl.float8e4nv:  # noqa: SIM300
        y = x.to(tl.float32) * inverse
        return tl.clamp(y, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)
    return x.to(DTYPE)
