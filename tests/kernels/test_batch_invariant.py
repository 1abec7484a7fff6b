"""deterministic: a token's result has the same bits alone as among others. Of what runs on the device: references on a
CPU (the interpreter's products are numpy's, which sums in an order of its own), kernels on a GPU. Products of quantized
weights run as kernels on both: the interpreter then adds up their inputs one by one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.batch import AttentionBatch
from kernels.paged_attention.cases import case as attention_case
from kernels.registry import Case, Op, registry
from kernels.testing import bound, seeded
from tests.kernels.interpreter import sum_in_turn
from tests.kernels.sizes import QUANTIZED_COUNTS, quantized_steps, wide_steps

# Arguments with a sequence for each token.
OF_TOKENS = ("x", "residual", "weights", "experts", "token_ids", "qkv", "positions", "slots")
# Tokens of a step, up to what the device has time for.
COUNTS = (2, 9, 16, 17, 33, 63, 64, 65, 72, 136, 257, 1023, 1024, 2047, 2048, 4097)
MOST = {"cuda": 4097, "cpu": 72}
# One for each height of tiles, which the interpreter has time for.
QUANTIZED = {"cuda": QUANTIZED_COUNTS, "cpu": (17, 64, 129)}
# What weights of another kind show as well: an activation behind a product, inputs as they are, an order, experts whose
# numbers a product of one matrix reads in the same way.
REPEATED = {
    "linear": (
        "fp8 blocks, silu",
        "fp8 rows, a given scale",
        "int8 both sides, silu",
        "int8 rows, inputs as they are",
        "int4 groups, silu",
        "nvfp4, rounded inputs",
        "blocks, gate and up in two formats",
        "blocks, silu",
    ),
    "moe_gemm": (
        "fp8 rows",
        "int8 rows, inputs as they are",
        "int8 groups, some elsewhere",
        "int4 groups in an order",
        "blocks, gate and up in two formats",
    ),
}
CPU = torch.device("cpu")


def _cases() -> list[Any]:
    made = []
    for op in registry():
        if "deterministic" not in inspect.signature(op.reference).parameters or op.name.endswith("attention"):
            continue
        for case in op.cases():
            inputs = case.make(CPU, seeded(CPU)) if case.small else {}
            if inputs.get("deterministic") and "x" in inputs and "batch" not in inputs and not case.mutated:
                made.append(pytest.param(op, case, id=f"{op.name}: {case.name} {case.dtype}"))
    return made


def _first(given: Any) -> torch.Tensor:
    return given if isinstance(given, torch.Tensor) else given[0]


@pytest.mark.parametrize(("op", "case"), _cases())
def test_a_token_alone_has_the_same_bits(op: Op, case: Case, device: torch.device) -> None:
    run: Callable[..., Any] = bound(op) if device.type == "cuda" else op.reference
    inputs = case.make(device, seeded(device))
    gated = op.name == "linear" and inputs["activation"] is not None
    if "residual" in inspect.signature(op.reference).parameters and inputs.get("residual") is None and not gated:
        out = _first(run(**case.make(device, seeded(device))))
        inputs["residual"] = torch.randn(out.shape, generator=seeded(device, 3), device=device).to(out.dtype)
    tokens = len(inputs["x"])
    own = [name for name in OF_TOKENS if inputs.get(name) is not None]
    copies = {name: inputs[name].clone() for name in own}
    together = _first(run(**{**inputs, **copies}))
    for token in {0, 1, tokens // 2, tokens - 1} & set(range(tokens)):
        seq = {name: inputs[name][token : token + 1].clone() for name in own}
        assert torch.equal(_first(run(**{**inputs, **seq}))[0], together[token]), f"token {token} of {tokens}"


@pytest.mark.parametrize(
    ("op", "kind"),
    [pytest.param(Op(op), kind, id=f"{op}: {kind}") for op, kinds in wide_steps().items() for kind in kinds],
)
def test_a_token_has_the_same_bits_in_steps_of_any_size(op: Op, kind: str, device: torch.device) -> None:
    run: Callable[..., Any] = bound(op) if device.type == "cuda" else op.reference
    most = MOST[device.type]
    inputs = {**wide_steps()[op.name][kind](most).make(device, seeded(device)), "deterministic": True}
    own = [name for name in OF_TOKENS if isinstance(inputs.get(name), torch.Tensor)]

    def rows(first: int, stop: int) -> torch.Tensor:
        return _first(run(**{**inputs, **{name: inputs[name][first:stop].clone() for name in own}}))

    probes = (0, 1, 7, 15)
    alone = torch.cat([rows(probe, probe + 1) for probe in probes])
    differ = []
    for count in (n for n in COUNTS if n <= most):
        together = rows(0, count)
        there = [i for i, probe in enumerate(probes) if probe < count]
        if not torch.equal(together[[probes[i] for i in there]], alone[there]):
            differ.append(count)
    assert not differ


@pytest.mark.parametrize(
    ("op", "kind"),
    [
        pytest.param(Op(op), kind, id=f"{op}: {kind}", marks=pytest.mark.slow if kind in REPEATED[op] else ())
        for op in ("linear", "moe_gemm")
        for kind in quantized_steps()[op]
    ],
)
def test_a_row_by_a_quantized_weight_has_the_same_bits_wherever_it_stands(
    op: Op, kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16
    if device.type == "cpu":
        # Where few rows are compared, bfloat16 would round most differences away.
        dtype = torch.float32
        sum_in_turn(monkeypatch)
    counts = QUANTIZED[device.type]
    inputs = {**quantized_steps(dtype)[op.name][kind](counts[-1]).make(device, seeded(device)), "deterministic": True}
    own = [name for name in OF_TOKENS if isinstance(inputs.get(name), torch.Tensor)]

    def rows(chosen: list[int]) -> torch.Tensor:
        made: torch.Tensor = bound(op)(**{**inputs, **{name: inputs[name][chosen] for name in own}})
        return made

    probes = [0, 15, 63, 127]
    alone = torch.cat([rows([probe]) for probe in probes])
    differ = []
    for count in counts:
        there = [i for i, probe in enumerate(probes) if probe < count]
        together = rows([*range(count)])
        if not torch.equal(together[[probes[i] for i in there]], alone[there]):
            differ.append(count)
    assert not differ
    assert torch.equal(rows([*reversed(range(counts[-1]))]), together.flip(0))


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (14, 2), (2, 2)])
def test_a_query_attends_with_the_same_bits_wherever_it_stands(heads: int, kv_heads: int, device: torch.device) -> None:
    """Alone, among sequences that fill a GPU twice over, whose tiles have one warp, and at the end of a prompt."""
    op = Op("paged_attention")
    run: Callable[..., Any] = bound(op) if device.type == "cuda" else op.reference
    lengths = [1 + 37 * i % 700 for i in range(150 if device.type == "cuda" else 12)]
    inputs = attention_case("", torch.bfloat16, [(1, length) for length in lengths], heads, kv_heads, 128).make(
        device, seeded(device)
    )
    together = run(**inputs, deterministic=True)
    before = torch.randn(7, heads, 128, generator=seeded(device, 1), device=device).bfloat16()
    for i in (0, 1, len(lengths) // 2, len(lengths) - 1):
        for queries in (1, 8):
            if queries > lengths[i]:
                continue
            q = torch.cat([before, inputs["q"][i : i + 1]])[-queries:]
            starts = torch.tensor([0, queries], dtype=torch.int32, device=device)
            batch = AttentionBatch(
                starts, inputs["batch"].context_len[i : i + 1], int(queries == 1), queries, lengths[i], lengths[i]
            )
            own = {**inputs, "q": q, "block_table": inputs["block_table"][i : i + 1], "batch": batch}
            assert torch.equal(run(**own, deterministic=True)[-1], together[i]), (lengths[i], queries)
