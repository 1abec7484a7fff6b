"""deterministic: how a row is computed follows from the row alone. Held by what is launched: over steps of many sizes
of one model each kernel has one set of constants, and torch's products, which go by the number of rows, have no part.

The interpreter sums in an order of its own, so bits are compared on a GPU alone: `test_batch_invariant`.
"""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.registry import Op, registry
from kernels.testing import bound, outputs, seeded
from tests.kernels.sizes import COUNTS, LONGEST, QUANTIZED_COUNTS, Step, quantized_steps, steps, wide_steps
from tests.kernels.test_specialisation import Launches
from tests.kernels.test_specialisation import launches as launches

STEPS = {**steps(), **wide_steps()}
SEQS = (*COUNTS[::4], 70, 150, 256)
TOKENS = (*SEQS, *QUANTIZED_COUNTS, 257, 1023, 1024, 2047, 2048, 4097)
# Of a dense product's tile, what says nothing of the order of a sum: its sides, which of them is the weight's, the
# pipeline, and whether slices of the inputs are taken by programs or in turn.
CUT = {"BM", "BN", "SWAP", "STAGES", "EVEN", "PREFETCH", "SPLIT", "SERIAL", "num_warps", "num_stages"}
# Which pairs stand beside each other is no part of their sums, nor how many channels a program adds up side by side.
PLACES, SIDES = {"_count", "_place"}, {"BLOCK_N", "num_warps"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "linear", "matmul"}

Constants = frozenset[tuple[str, str]]
# Of a kernel's launches in one step, which may be several.
Orders = frozenset[Constants]


class Products(TorchDispatchMode):
    """Notes torch's own products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            self.seen.add(name)
        return func(*args, **(kwargs or {}))


def order(name: str, constants: tuple[Any, ...]) -> Constants:
    """What of a launch's constants a sum's order may hang on."""
    held = dict(constants)
    if name == "combine":
        return frozenset((k, v) for k, v in held.items() if k not in SIDES)
    if name != "tile_kernel":
        return frozenset(held.items())
    slices = str(int(held["SPLIT"]) * int(held["SERIAL"]))
    return frozenset({"SLICES": slices, **{k: v for k, v in held.items() if k not in CUT}}.items())


def _ones(*shape: Any, generator: torch.Generator, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


def launched(op: Op, kinds: dict[str, Step], launches: Launches) -> dict[str, set[Orders]]:
    """By kernel, what its launches in a step are made with, over steps of those kinds; nothing where it has none. On a
    CPU as on a GPU."""
    device, cpu = torch.device("cpu"), torch.device("cpu")
    made: list[dict[str, Orders]] = []
    for kind, step in kinds.items():
        of_seqs = kind in ("decoding", "prompt", "mixed", "expanded")
        for count in (n for n in (SEQS if of_seqs else TOKENS) if n < LONGEST or not of_seqs):
            case = step(count)
            with mock.patch.object(torch, "randn", _ones):  # nothing is computed with them
                inputs = {**case.make(device, seeded(cpu)), "deterministic": True}
            with Products() as products:
                outputs(bound(op), case, inputs)
            assert not products.seen, f"{kind} of {count}: torch's own {products.seen}"
            seen = ((kernel.fn.__name__, cuts) for kernel, cuts in launches.seen.items())
            made.append({name: frozenset(order(name, constants) for constants in cuts) for name, cuts in seen})
            launches.seen.clear()
    names = {name for step in made for name in step} - PLACES
    return {name: {step.get(name, frozenset()) for step in made} for name in names}


def cases() -> list[Any]:
    return [
        pytest.param(op, group, id=f"{op.name}: {prefix}{', '.join(group)}")
        for op in registry()
        if "deterministic" in inspect.signature(op.reference).parameters
        for prefix, by_op in (("", STEPS), ("quantized, ", quantized_steps()))
        for group in _groups(op.name, by_op.get(op.name, {}))
    ]


def _groups(op: str, steps: dict[str, Step]) -> list[dict[str, Step]]:
    """One model's sequences, whatever they are, together; other kinds are other models. A sequence of several queries
    is never expanded in the mode."""
    kinds = {kind: step for kind, step in steps.items() if (op, kind) != ("latent_attention", "expanded")}
    return [kinds] if "decoding" in kinds else [{kind: step} for kind, step in kinds.items()]


@pytest.mark.parametrize(("op", "kinds"), cases())
def test_a_row_is_computed_one_way_whatever_stands_beside_it(
    op: Op, kinds: dict[str, Step], launches: Launches, device: torch.device
) -> None:
    if device.type == "cuda":
        pytest.skip(
            "what is launched is noted instead of being run, which is the CPU's suite's; bits are compared here"
        )
    found = launched(op, kinds, launches)
    assert found, "no launch was seen"
    for name, orders in found.items():
        first, *others = orders
        assert not others, f"{name}: {[[sorted(order) for order in first ^ other] for other in others]}"


def test_a_step_of_the_last_tokens_takes_the_kernels_of_all_tokens(launches: Launches, device: torch.device) -> None:
    """What the trimmed last layer calls is what the others call within one op."""
    if device.type == "cuda":
        pytest.skip(
            "what is launched is noted instead of being run, which is the CPU's suite's; bits are compared here"
        )
    within = launched(Op("rope_attention"), STEPS["rope_attention"], launches)
    apart = launched(Op("paged_attention"), STEPS["paged_attention"], launches)
    assert set(apart) == {"attend"}
    assert within["attend"] == apart["attend"]


def test_a_product_by_rows_is_caught() -> None:
    with Products() as products:
        torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
    assert products.seen
