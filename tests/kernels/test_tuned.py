"""Tuned numbers: a GPU has its file or the default, every number is read, and what is no table is refused."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.tuned.tables import DEFAULT, FOLDER, describe, name_of, numbers, read, tables

ROOT = Path(__file__).resolve().parents[2]


def test_a_gpu_has_its_table_and_an_unknown_one_the_default() -> None:
    assert name_of("NVIDIA H200") == "h200"
    assert name_of("NVIDIA H100 80GB HBM3") == "h100"
    assert name_of("NVIDIA A100-SXM4-80GB") == name_of("") == DEFAULT
    assert "kernels/tuned/h200.json: measured" in describe("NVIDIA H200")
    assert "no numbers of this GPU" in describe("some GPU")
    assert [name for name, table in tables().items() if table.algorithms] == ["h200"]


def test_every_table_has_every_number() -> None:
    own = tables()["h200"].numbers
    for name, op in itertools.product(tables(), own):
        held = numbers(name, op)
        assert held.keys() == own[op].keys()
        assert {key: type(value) for key, value in held.items()} == {key: type(v) for key, v in own[op].items()}


def test_every_number_is_read() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "kernels").rglob("*.py"))
    for op, held in tables()["h200"].numbers.items():
        assert f'"{op}"' in sources
        unread = [key for key in held if f'"{key}"' not in sources and f"'{key}'" not in sources]
        assert not unread, f"{op}: nobody reads {unread}"
        for key, value in held.items():
            if key.endswith(("_tiles", "_cuts")):
                assert not [name for name in value if f'"{name}"' not in sources], f"{op}, {key}"


def test_tiles_of_a_table_are_the_ops_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another table gives other tiles and thresholds: they are not the code's."""
    from kernels.linear.dispatch import DISPATCH as LINEAR
    from kernels.linear.dispatch import Problem, vector_tile
    from kernels.tuned import tables as module

    own = json.loads((FOLDER / "h200.json").read_text())
    linear = own["numbers"]["linear"]
    linear["vector_tiles"]["plain"]["outputs"] = 16
    linear["all_gated_persistent_rows"] = linear["gated_persistent_rows"] = 1 << 20
    mine = module.Table("mine", (), None, "", own["numbers"], {})
    monkeypatch.setattr(module, "tables", lambda: {**tables(), "mine": mine})
    found = [vector_tile(2048, 4096, False, False, table).outputs for table in (DEFAULT, "mine")]
    assert found == [2, 16]
    sizes: tuple[Any, ...] = (4096, 4096, 4096, torch.bfloat16, False, "silu", False, True, True, 132)
    assert LINEAR.choose(Problem(*sizes)).name == "gated_persistent"
    assert LINEAR.choose(Problem(*sizes, table="mine")).name == "library"


def test_the_interpreter_takes_the_default() -> None:
    from kernels.workspace import Workspace

    assert Workspace(torch.device("cpu")).table == DEFAULT


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([], "no table"),
        ({"note": ""}, "gpus"),
        ({"gpus": [], "note": "", "tiles": {}}, "tiles, which nobody reads"),
        ({"gpus": [], "note": "", "algorithms": {"x": {}}}, "no table"),
    ],
)
def test_what_is_no_table_is_refused_with_its_name(held: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=said) as raised:
        read(path)
    assert "wrong.json" in str(raised.value)
