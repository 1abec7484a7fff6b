"""The Gluon kernels over latents: that they compile for Hopper where no GPU can run them, and how stream-K's partials
are combined.

Results are held by the cases of `latent_attention` on a GPU (tests/kernels/test_ops.py): Gluon has no interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.testing import TOLERANCES, assert_close, seeded
from tests.compiled import SHARED_BYTES, run

COMPILE = """
from kernels.latent_attention.prompt import KEYS, SEQS, STAGES, attend_kernel
from kernels.latent_attention.stream_k import STAGES as DEPTH, stream_k_kernel
from kernels.latent_attention.up import ENTRIES, STAGES as UP_STAGES, up_kernel
from kernels.moe_gemm.grouped import REGISTERS as UP_REGISTERS
from tests.compiled import box, for_hopper


def made(kernel, constants, kinds, starts=0, **options):
    def kind(name):
        return kinds.get(name, "*i32" if name.startswith("p_") else "i32")

    found = for_hopper(kernel, constants, kind, **options)
    assert found.asm["ttgir"].count("iter_args(%start") == starts, "Triton took a line's first tile for a constant"
    assert "setmaxnreg" in found.asm["ptx"], "the reading warp gives its registers away"
    print(found.metadata.shared)
    return found.asm["ptx"]


heads = {"HEADS": 16, "PDL": True, "SEQS": SEQS}
ptx = made(
    stream_k_kernel,
    {**heads, "LATENT": 512, "SLABS": 9, "BLOCK_SIZE": 16, "COPIED": 16, "STAGES": DEPTH},
    {"q_desc": box(16, 64), "c_desc": box(16, 64), "p_partials": "*fp32", "p_sums": "*fp32", "scale": "fp32"},
    starts=3,
)
assert "wgmma.mma_async.sync.aligned.m64n16k16" in ptx
ptx = made(
    attend_kernel,
    {**heads, "NOPE": 128, "ROPE": 64, "VALUE": 128, "PADDED": ENTRIES, "BLOCK_N": KEYS, "STAGES": STAGES},
    {"q_desc": box(64, 1, 64), "kv_desc": box(KEYS, 64), "rotated_desc": box(KEYS, 64), "p_out": "*bf16",
     "scale": "fp32"},
)
assert "wgmma.mma_async.sync.aligned.m64n128k16" in ptx and "cp.async.bulk.tensor.3d" in ptx
ptx = made(
    up_kernel,
    {"LATENT": 512, "BLOCK_SIZE": 16, "COPIED": 16, "ENTRIES": ENTRIES, "SEQS": SEQS, "STAGES": UP_STAGES,
     "PDL": True},
    {"c_desc": box(16, 64), "w_desc": box(64, 64), "y_desc": box(64, 64), "cache": "*bf16", "p_rotated": "*bf16"},
    maxnreg=UP_REGISTERS,
)
assert "wgmma.mma_async.sync.aligned.m64n256k16" in ptx
"""


@pytest.mark.slow
def test_compile_for_hopper(tmp_path: Path) -> None:
    assert all(0 < int(size) < SHARED_BYTES for size in run(COMPILE, tmp_path).split())


@settings(deadline=None, max_examples=12)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=9).filter(any),
    programs=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_partials_of_equal_ranges_are_found_and_combined(lengths: list[int], programs: int, seed: int) -> None:
    """Of P programs, or of as many as there are tiles, program p takes tiles p·U/P to (p + 1)·U/P of all sequences' U;
    its partial of sequence i stands at p + i."""
    from kernels.latent_attention.stream_k import ENTRIES, _combine_stream_k

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads, latent, value, entries = 2, 16, 16, ENTRIES.value
    g = seeded(torch.device("cpu"), seed)
    tiles = [-(-length // entries) for length in lengths]
    total, seqs = sum(tiles), len(lengths)
    busy = min(programs, total)
    partials = torch.full((programs + seqs, heads, latent), float("nan"))
    sums = torch.full((programs + seqs, heads), float("nan"))
    v_up = torch.randn(heads, value, latent, generator=g)
    want = torch.zeros(seqs, heads, value)
    for i, length in enumerate(lengths):
        s, c = torch.randn(heads, length, generator=g), torch.randn(length, latent, generator=g)
        if length:
            want[i] = torch.einsum("hl,hvl->hv", s.softmax(1) @ c, v_up)
        for p in range(busy):
            first, stop = (max(at * total // busy - sum(tiles[:i]), 0) * entries for at in (p, p + 1))
            if first < min(stop, length):
                partials[p + i] = s[:, first:stop].softmax(1) @ c[first:stop]
                sums[p + i] = s[:, first:stop].logsumexp(1) / torch.log(torch.tensor(2.0))
    out = torch.zeros(seqs, heads, value, device=device)
    context_len = torch.tensor(lengths, dtype=torch.int32, device=device)
    _combine_stream_k[(heads, 1, 1)](
        partials.to(device), sums.to(device), v_up.to(device), context_len, out, value * latent, seqs, programs,
        HEADS=heads, LATENT=latent, VALUE=value, TILE=entries, BLOCK_T=16, BLOCK_V=16, BLOCK_B=16, AT_ONCE=3, PDL=False,
    )  # fmt: skip
    assert_close("joined", out.cpu(), want, TOLERANCES[torch.float32])
