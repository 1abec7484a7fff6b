"""Algorithms of the table are taken where they were measured, right, and left to torch everywhere else.

On a GPU of the table's kind every algorithm runs; elsewhere a stand-in for the library shows which products reach it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.linear import blas, tuned_gemms
from kernels.linear.blas import REDUCE_IN_FLOAT, Algorithm, Product, Refused
from kernels.linear.tuned_gemms import Products, find
from kernels.testing import TOLERANCES, assert_close, randn, seeded
from kernels.tuned.tables import FOLDER, Algorithms, Table, read, tables
from kernels.weight import Dense
from kernels.workspace import Workspace

ROWS, INPUTS, OUTPUTS = 24, 64, 48
ONE: Algorithms = {(OUTPUTS, INPUTS): {ROWS: (66, 20)}}


class StandIn:
    """Multiplies by torch and notes that it was asked to."""

    version = 7

    def __init__(self) -> None:
        self.launched: list[Algorithm] = []
        self.refuses = False

    def plan(self, product: Product, algorithm: Algorithm) -> SimpleNamespace:
        if self.refuses:
            raise Refused(f"{algorithm} for {product}")
        return SimpleNamespace(algorithm=algorithm)

    def multiply(self, plan: Any, x: torch.Tensor, weight: torch.Tensor, residual: Any, y: torch.Tensor) -> None:
        self.launched.append(plan.algorithm)
        y.copy_(x @ weight.t() if residual is None else residual + x @ weight.t())


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(tuned_gemms, "_opened", lambda device: (made, ONE))
    return made


Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(device: torch.device, rows: int = ROWS, inputs: int = INPUTS, outputs: int = OUTPUTS) -> Operands:
    generator = seeded(device)

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return randn(generator, device, torch.bfloat16, *shape, scale=scale)

    return make(rows, inputs), make(outputs, inputs, scale=inputs**-0.5), make(rows, outputs)


def expected(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    y = x.float() @ weight.float().t()
    return (y if residual is None else y + residual.float()).bfloat16()


def test_a_product_of_the_table_takes_its_algorithm(library: StandIn, device: torch.device) -> None:
    x, weight, residual = operands(device)
    products = Products()
    y = products.multiply(x, weight, None)
    assert y is not None
    assert_close("product", y, expected(x, weight, None), TOLERANCES[torch.bfloat16])
    want = expected(x, weight, residual)
    summed = products.multiply(x, weight, residual)
    assert summed is residual, "the sum stands in the residual's place"
    assert_close("sum", summed, want, TOLERANCES[torch.bfloat16])
    assert library.launched == [Algorithm(66, 20)] * 2


Change = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x, w, r: (x[:-1], w, r[:-1]), id="a row less"),
        pytest.param(lambda x, w, r: (x, w[:-8], r[:, :-8].contiguous()), id="other outputs"),
        pytest.param(lambda x, w, r: (x.half(), w.half(), r.half()), id="another type"),
        pytest.param(lambda x, w, r: (x.t().contiguous().t(), w, r), id="columns side by side"),
        pytest.param(lambda x, w, r: (torch.cat((x, x[:, :3]), 1)[:, :INPUTS], w, r), id="rows off their alignment"),
        pytest.param(lambda x, w, r: (x, w, torch.cat((r, r), 1)[:, :OUTPUTS]), id="a residual of strided rows"),
    ],
)
def test_other_products_are_left_to_torch(change: Change, library: StandIn, device: torch.device) -> None:
    assert Products().multiply(*change(*operands(device))) is None
    assert library.launched == []


def test_the_switch_leaves_the_products_of_its_engine_to_torch(library: StandIn, device: torch.device) -> None:
    from kernels.linear import dispatch

    x, weight, _ = operands(device)
    for measured, launched in ((False, 0), (True, 1), (False, 1)):
        own = Workspace(device, tuned_gemms=measured)
        dispatch.library(dispatch.Operands(own, x, weight, None, None, 0.0, 0.0, None, None))
        assert len(library.launched) == launched


def test_engines_have_scratch_memory_of_their_own(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StandIn] = []
    monkeypatch.setattr(tuned_gemms, "_opened", lambda device: (made.append(StandIn()) or made[-1], ONE))
    x, weight, _ = operands(device)
    for products in (Products(), Products()):
        for _ in range(2):
            assert products.multiply(x, weight, None) is not None
    assert [len(library.launched) for library in made] == [2, 2]


def test_what_the_library_refuses_is_left_to_torch(
    library: StandIn, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight, _ = operands(device)
    library.refuses = True
    products = Products()
    with caplog.at_level(logging.INFO):
        assert products.multiply(x, weight, None) is None
        assert products.multiply(x, weight, None) is None
    assert len(caplog.records) == 1, "said once, not at every step"


@pytest.mark.parametrize(
    ("name", "version", "taken"),
    [("mine", 7, True), ("other", 7, False), ("mine", 8, False), ("mine", None, False)],
)
def test_another_gpu_or_library_takes_nothing_of_the_table(
    name: str, version: int | None, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:

    def make(device: torch.device) -> SimpleNamespace:
        if version is None:
            raise OSError("libcublasLt.so: cannot open shared object file")
        return SimpleNamespace(version=version)

    held = {"mine": Table("mine", ("a GPU",), None, "", {}, {7: ONE}), "other": Table("other", (), None, "", {}, {})}
    monkeypatch.setattr(tuned_gemms, "tables", lambda: held)
    monkeypatch.setattr(tuned_gemms, "tuned", lambda device: name)
    monkeypatch.setattr(blas, "Blas", make)
    opened = tuned_gemms._opened(torch.device("cuda", 0))
    assert (opened is not None) == taken
    assert opened is None or opened[1] == ONE


def test_the_linear_op_gives_the_same_with_a_tuned_algorithm(library: StandIn, device: torch.device) -> None:
    from kernels.linear import dispatch, reference

    own = Workspace(device)
    for activation, summed in (("silu", False), (None, True), (None, False)):
        x, weight, residual = operands(device)
        given = {"activation": activation, "residual": residual if summed else None}
        want = reference.linear(x, Dense(weight), **given)
        added = residual.clone() if summed else None
        got = dispatch.library(dispatch.Operands(own, x, weight, None, None, 0.0, 0.0, added, activation))
        assert_close(f"{activation}, {summed}", got, want, TOLERANCES[torch.bfloat16])
    assert len(library.launched) == 3


def test_long_products_take_what_the_next_measured_size_or_the_largest_takes() -> None:
    one, other = (66, 20), (66, 23)
    table: Algorithms = {(48, 64): {1024: one, 2048: None, 4096: one, 8192: other}}
    sizes = (1000, 1024, 2048, 3000, 4096, 5000, 5999, 6000, 8191, 8192, 8193, 20000)
    taken = {rows: find(table, 48, 64, rows) for rows in sizes}
    assert [rows for rows, algorithm in taken.items() if algorithm == Algorithm(*one)] == [1024, 4096]
    assert [rows for rows, found in taken.items() if found == Algorithm(*other)] == [6000, 8191, 8192, 8193, 20000]
    assert find(table, 64, 48, 1024) is None
    assert find({(48, 64): {4096: one}}, 48, 64, 7000) is None, "the algorithm of few rows is none for many"


def entries() -> Iterator[tuple[int, int, int, Algorithm]]:
    for table in tables().values():
        for algorithms in table.algorithms.values():
            for (outputs, inputs), by_rows in algorithms.items():
                for rows, numbers in by_rows.items():
                    if numbers is not None:
                        yield outputs, inputs, rows, Algorithm(*numbers)


def test_algorithms_of_the_table_add_up_in_float32() -> None:
    assert list(entries())
    for outputs, inputs, rows, algorithm in entries():
        assert rows > 64
        assert outputs % 8 == inputs % 8 == 0
        assert algorithm.reduction == (REDUCE_IN_FLOAT if algorithm.split > 1 else 0)


def test_every_algorithm_of_the_table_is_right_and_gives_its_bits_again(device: torch.device) -> None:
    """All of them where the table was measured; on any other machine none is taken."""
    taken, products = 0, Products()
    for outputs, inputs, rows, _ in entries():
        if products._plan(device, Product(rows, inputs, outputs, stride=inputs)) is None:
            continue
        x, weight, residual = operands(device, rows, inputs, outputs)
        for start in (None, residual):
            want = expected(x, weight, start)
            once, again = (products.multiply(x, weight, None if start is None else start.clone()) for _ in range(2))
            assert once is not None
            assert again is not None
            name = f"{outputs}x{inputs}, {rows} rows"
            assert_close(name, once, want, TOLERANCES[torch.bfloat16])
            assert torch.equal(once, again), f"{name}: other bits in another run"
        taken += 1
    measured = products._library(device) is not None
    assert taken == (len(list(entries())) if measured else 0)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    from perf.tune.blas import write_table, written

    path = tmp_path / "mine.json"
    numbers = [66, 20, 35, 3, 0, 1, 0, 0, 1]
    record = {"outputs": OUTPUTS, "inputs": INPUTS, "best": numbers, "torch_us": 10.0}
    records = [{**record, "rows": 256, "best_us": 9.0}, {**record, "rows": 128, "best_us": 9.99}]
    for version in (7, 8):
        write_table(path, "a GPU", version, records)
    table = read(path)
    assert (table.gpus, table.inherits) == (("a GPU",), "h200")
    want: Algorithms = {(OUTPUTS, INPUTS): {128: None, 256: tuple(numbers)}}
    assert table.algorithms == {7: want, 8: want}
    for kept in FOLDER.glob("*.json"):
        assert written(json.loads(kept.read_text())) + "\n" == kept.read_text()
