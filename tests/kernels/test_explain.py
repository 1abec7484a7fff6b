"""`python -m kernels.explain` says for every op that chooses who runs, why others decline, and what was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINEAR, EXPERTS = "linear 64x14336x4096", "moe_gemm 64x2048x768x128x8"


def said(arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    from kernels.explain.__main__ import main

    main(arguments.split())
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "winner"),
    [
        (LINEAR, "stream"),
        (f"{LINEAR} --deterministic", "invariant_few"),
        ("linear 200x14336x4096 --deterministic", "invariant_many"),
        ("linear 64x14332x4096 --deterministic", "invariant"),
        (f"{LINEAR} --arch 80", "library"),
        ("linear 8192x4096x4096 --norm", "library"),
        ("linear 64x14336x4096 --weight int4 --activation silu", "stream"),
        ("linear 100x14336x4096 --weight int4 --activation silu", "mixed_input"),
        ("linear 100x14336x4096 --weight int4 --arch 89", "written_out"),
        (f"{LINEAR} --weight fp4", "tiles"),
        (f"{LINEAR} --weight fp8 --residual", "stream"),
        ("linear 8x14336x4096 --weight int8 --bias", "tiles"),
        ("linear 512x4096x4096 --weight q4_k", "written_out"),
        ("linear 8x14336x4096 --weight q4_k --activation silu", "stream"),
        ("linear_norm 64x2048x4096", "split"),
        ("linear_norm 65x2048x4096", "apart"),
        ("gated_mlp 512x4096x14336 --weight fp8 --norm --residual", "rounded"),
        ("gated_mlp 64x4096x14336 --weight fp8", "apart"),
        ("gated_mlp 1x4096x2048 --weight fp8 --limit 10 --norm --residual", "clipped_row"),
        ("gated_mlp 1x4096x2048 --weight fp8 --limit 10 --deterministic", "apart"),
        ("gated_mlp 1x4096x2048 --weight fp8", "apart"),
        ("group_linear 1x8x1024x4096 --weight fp8", "fp8_rows"),
        ("group_linear 65x8x1024x4096 --weight fp8 --deterministic", "fp8_rows"),
        ("group_linear 65x8x1024x4096 --weight fp8", "written_out"),
        ("group_linear 64x8x1024x4096", "rows"),
        ("group_linear 65x8x1024x4096", "library"),
        (EXPERTS, "tiles"),
        ("moe_gemm 1x2048x768x128x8 --residual", "rows"),
        ("moe_gemm 1024x2048x768x128x8", "grouped"),
        ("moe_gemm 8x2880x2880x32x4 --weight fp4 --activation swiglu_oai", "ring"),
        ("moe_gemm 4096x2048x1024x16x2 --weight int4", "written_out"),
        (f"{EXPERTS} --weight fp8", "w8a8_tiles"),
        ("moe_gemm 4x2048x768x128x8 --weight fp8", "alone"),
        (f"{EXPERTS} --weight q8_0", "tiles"),
        ("moe 64x2048x768x128x8", "rings"),
        ("moe 1x2048x768x128x8", "rows"),
        ("paged_attention 64x32x8x128", "persistent"),
        ("paged_attention 64x32x8x128 --cache fp8", "persistent_fp8"),
        ("paged_attention 64x32x8x128 --window 512", "split"),
        ("paged_attention 0x32x8x128 --longer 8x1024", "prompt"),
        ("paged_attention 0x32x8x128 --longer 8x1024 --cache fp8", "upcast_prompt"),
        ("paged_attention 0x32x8x128 --longer 8x1024 --arch 100", "tiles"),
        ("rope_attention 1x32x8x128", "fused"),
        ("rope_attention 64x32x8x128", "two_ops"),
        ("latent_attention 8x16 --context 32", "stream_k"),
        ("latent_attention 2x16 --context 32", "split_kv"),
        ("latent_attention 0x16 --context 32 --longer 2x32", "expanded"),
        ("latent_attention 0x16 --context 32 --longer 2x32 --absorbed", "chunks"),
    ],
)
def test_every_op_says_who_runs(arguments: str, winner: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(arguments, capsys)
    assert re.search(rf"^  {winner} +runs", text, re.MULTILINE), text
    assert text.count("measured: ") == len(re.findall(r"^  \w+ +runs", text, re.MULTILINE))
    assert "launches: " in text


def test_it_says_why_others_decline_and_what_is_launched(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(LINEAR, capsys)
    assert "warp_specialized  declines: " in text
    assert "measured: docs/experiments/2026-11-20-decode-products.md" in text
    assert "launches: stream_kernel[132]" in text
    text = said("linear 100x14336x4096 --weight int4 --activation silu", capsys)
    assert "written_out       would take it" in text
    text = said("linear 8192x4096x4096 --norm", capsys)
    assert "cublasLt" in text
    assert "launches: _norm[8192]" in text


def test_what_is_decided_within_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    text = said("linear 512x4096x4096 --weight fp4", capsys)
    assert "linear, packed integers and 4-bit floats: rows=512" in text
    assert "linear, dense weight: rows=512" in text
    text = said("rope_attention 64x32x8x128 --longer 1x1024", capsys)
    assert "paged_attention, sequences of one query: " in text
    assert "paged_attention, longer sequences: " in text


@pytest.mark.parametrize("arguments", ["linear 64x14336", "moe_gemm 64x2048x768x0x8", "linear axbxc", "rms_norm 4x4"])
def test_no_shape_of_the_op_is_refused(arguments: str) -> None:
    from kernels.explain.__main__ import main

    with pytest.raises(SystemExit):
        main(arguments.split())


def test_what_was_measured_is_there() -> None:
    """Every file that a variant's evidence names exists; one that names none says that nothing was measured."""
    from kernels.explain.dispatches import DISPATCHES

    results = {path.name for path in (ROOT / "perf" / "results").rglob("*.json*")}
    variants = [(op, variant) for op, dispatch in DISPATCHES.items() for variant in dispatch.variants]
    assert len(variants) > 40
    for op, variant in variants:
        named = re.findall(r"[\w./-]+\.(?:md|jsonl?|py)\b", variant.evidence)
        missing = [name for name in named if name not in results and not (ROOT / name).is_file()]
        assert not missing, f"{op}, {variant.name}: no file {missing}"
        assert named or "the only one" in variant.evidence, f"{op}, {variant.name}: {variant.evidence}"


def test_every_dispatch_has_a_variant_for_every_problem() -> None:
    from kernels.explain.dispatches import DISPATCHES

    for op, dispatch in DISPATCHES.items():
        assert len({variant.name for variant in dispatch.variants}) == len(dispatch.variants), op
        for problem, choice in dispatch.decided().items():
            assert choice.name == next(v.name for v, why in dispatch.refusals(problem) if why is None)
