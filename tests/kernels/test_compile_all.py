"""Cases compiled for GPUs that are not there, and what the tool says of kernels that do not compile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import run

pytestmark = pytest.mark.slow

PLANTED = """
import json
from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from kernels import hardware
from kernels.compile_all import TARGETS, walk
from kernels.registry import Case, Op
from kernels.testing import EXACT, randn


@triton.jit
def after_a_return(y, GROUP: tl.constexpr):
    if GROUP == 0 or GROUP >= 128:
        return
    tl.store(y + tl.arange(0, 128 // GROUP), 0.0)


@triton.jit
def rows(x, y, SIDE: tl.constexpr, STAGES: tl.constexpr):
    at = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    acc = tl.zeros((SIDE, SIDE), tl.float32)
    for i in tl.range(0, 64, num_stages=STAGES):
        acc += tl.dot(tl.load(x + i * SIDE + at), tl.load(y + i * SIDE + at))
    tl.store(y + at, acc.to(y.dtype.element_ty))


def op(name, kernel, **constants):
    def launch(workspace, x, y):
        workspace.launch(kernel, (1,))(*((x, y) if kernel is rows else (y,)), **constants, num_warps=4)

    return SimpleNamespace(name=name, kernel=launch)


def make(device, generator):
    return {name: randn(generator, device, torch.bfloat16, 128, 128) for name in ("x", "y")}


planted = Case("planted", torch.bfloat16, make, EXACT, 1, 1)
huge = Case(
    "cut by values", torch.float32, lambda d, g: {"x": torch.empty(1 << 33, device=d)[0].item()}, EXACT, 1 << 35, 1
)


def said(op, cases, arch):
    report = walk(op, cases, TARGETS[arch])
    failures = [[failure.case, failure.kernel, failure.reason] for failure in report.failures]
    return [report.cases, len(report.variants), failures, report.left_out]


norm = Op("rms_norm")
driver = triton.runtime.driver._active
print(json.dumps({
    "norm": said(norm, [case for case in norm.cases() if case.dtype == torch.bfloat16], 90),
    "return": said(op("planted", after_a_return, GROUP=256), [planted], 90),
    "fits": said(op("planted", rows, SIDE=128, STAGES=3), [planted], 90),
    "too much": said(op("planted", rows, SIDE=128, STAGES=3), [planted], 89),
    "launcher": said(SimpleNamespace(name="planted", kernel=lambda workspace, x, y: x.tolist()), [planted], 90),
    "huge": said(norm, [huge], 90),
    "left behind": triton.runtime.driver._active is not driver or hardware._described.get() is not None,
}))
"""


# Tiles that were tuned for more shared memory than this GPU has.
FITTED = """
import json

from kernels.compile_all import TARGETS, walk
from kernels.registry import Op

NAMES = {
    "linear": ("T8 Qwen3-4B gate and up", "T8 Qwen3-8B-FP8 qkv"),
    "rope_attention": ("1 single split 32/8x128",),
    "latent_partials": ("8 sequences of 4096, 64 heads",),
    "moe_gemm": ("tiles of 128",),
}
said = {}
for name, cases in NAMES.items():
    op = Op(name)
    some = list({case.name: case for case in op.cases() if case.name in cases}.values())
    report = walk(op, some, TARGETS[89])
    said[name] = [report.cases == len(cases), sorted(report.left_out), [f.reason for f in report.failures]]
print(json.dumps(said))
"""


ENDING = """
import json
import os
import sys
from types import ModuleType

import torch

from kernels.registry import registry
from kernels.compile_all import workers
from kernels.registry import Case
from kernels.testing import EXACT

def case(name):
    return Case(name, torch.float32, lambda device, generator: {"name": name}, EXACT, 1, 1)

def planted(workspace, name):
    if name == "ends":
        os.abort()

for part, value in {"kernel": planted, "cases": lambda: [case(name) for name in ("before", "ends")]}.items():
    module = sys.modules[f"kernels.planted.{part}"] = ModuleType(part)
    setattr(module, "planted" if part == "kernel" else part, value)

if __name__ == "__main__":
    reports = []
    workers.run_all(workers.tasks(["planted"], [90]), 1, reports.append)
    print(json.dumps([[report.cases, [[f.case, f.reason] for f in report.failures]] for report in reports]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(run(PLANTED, tmp_path_factory.mktemp("compile_all")))
    return said


def test_every_case_of_an_op_compiles(told: dict[str, Any]) -> None:
    cases, variants, failures, left_out = told["norm"]
    assert cases > variants > 1
    assert not failures
    assert not left_out


def test_a_kernel_that_does_not_compile_is_told_with_its_case_and_place(told: dict[str, Any]) -> None:
    [[case, kernel, reason]] = told["return"][2]
    assert (case, kernel) == ("planted bfloat16", "after_a_return")
    assert "arange's end argument must be greater" in reason
    assert "in after_a_return" in reason


def test_shared_memory_is_held_to_what_the_gpu_has(told: dict[str, Any]) -> None:
    assert not told["fits"][2]
    [[_, kernel, reason]] = told["too much"][2]
    assert kernel == "rows"
    assert reason.startswith("needs ")
    assert reason.endswith(" bytes of shared memory; a block has 101376 on sm_89")


def test_a_launcher_that_reads_the_device_is_told(told: dict[str, Any]) -> None:
    [[_, kernel, _]] = told["launcher"][2]
    assert kernel == "launcher"


def test_a_case_cut_by_values_that_are_not_there_is_left_out(told: dict[str, Any]) -> None:
    cases, variants, failures, left_out = told["huge"]
    assert (cases, variants, failures) == (1, 0, [])
    assert "32768 MiB" in left_out["cut by values float32"]


def test_nothing_is_left_behind(told: dict[str, Any]) -> None:
    assert told["left behind"] is False


def test_tiles_of_large_gpus_are_cut_to_99_kib(tmp_path: Path) -> None:
    for op, said in json.loads(run(FITTED, tmp_path)).items():
        assert said == [True, [], []], op


def test_a_process_that_ends_costs_the_case_that_it_was_at(tmp_path: Path) -> None:
    reports = json.loads(run(ENDING, tmp_path))
    assert sum(cases for cases, _ in reports) == 2
    assert [failure for _, failures in reports for failure in failures] == [
        ["ends float32", "ended the process that compiled it"]
    ]
