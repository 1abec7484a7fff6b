"""Loading fills every parameter from the right bytes, and names whatever does not fit."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights import loader, staging
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Rule, SharedBehind, SharedBehindConcat, Stack, StackConcat, concat

RULES = [
    Rule("embed", ("model.embed",)),
    Rule("qkv", ("q", "k", "v"), concat(4, 2, 2)),
    Rule("experts", ("e0.gate", "e0.up", "e1.gate", "e1.up"), StackConcat()),
    Rule("down", ("e0.down", "e1.down"), Stack()),
]


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed": (10, 6), "q": (4, 6), "k": (2, 6), "v": (2, 6)}
    for e in range(2):
        shapes |= {f"e{e}.gate": (3, 6), f"e{e}.up": (3, 6), f"e{e}.down": (6, 3)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Filled with NaN: what is not written shows."""
    shapes = {"embed": (10, 6), "qkv": (8, 6), "experts": (2, 6, 6), "down": (2, 6, 3)}
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()}


def load(folder: Path, params: dict[str, torch.Tensor], unused: tuple[str, ...] = ()) -> None:
    loader.load(params, Checkpoint.open(folder), RULES, unused)


def check(params: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    dtype = params["embed"].dtype
    wanted = {
        "embed": stored["model.embed"],
        "qkv": torch.cat([stored[name] for name in "qkv"]),
        "experts": torch.stack([torch.cat((stored[f"e{e}.gate"], stored[f"e{e}.up"])) for e in range(2)]),
        "down": torch.stack([stored[f"e{e}.down"] for e in range(2)]),
    }
    for name, value in wanted.items():
        assert torch.equal(params[name], value.to(dtype)), name


def test_what_a_parameter_is_stored_in_is_known_before_it_is_made(tmp_path: Path) -> None:
    stored = tensors()
    stored["k"], stored["e1.down"] = stored["k"].bfloat16(), stored["e1.down"].half()
    save_file(stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert loader.dtypes(checkpoint, RULES, "qkv") == {torch.float32, torch.bfloat16}
    assert loader.dtypes(checkpoint, RULES, "down") == {torch.float32, torch.float16}
    assert loader.dtypes(checkpoint, RULES, "embed") == {torch.float32}


def test_the_usual_name_goes_before_other_files(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    save_file({"q": torch.zeros(9, 9)}, tmp_path / "consolidated.safetensors")
    params = parameters()
    load(tmp_path, params)
    check(params, tensors())


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_one_file(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    values = {name: value.to(stored) for name, value in tensors().items()}
    save_file(values, tmp_path / "model.safetensors")
    params = parameters(wanted)
    load(tmp_path, params)
    check(params, values)


def test_a_checkpoint_has_the_dtype_of_its_floats(tmp_path: Path) -> None:
    values = {"a.ids": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(2, dtype=torch.float16)}
    save_file(values, tmp_path / "model.safetensors")
    assert Checkpoint.open(tmp_path).dtype == torch.float16


def test_shards_by_their_index(tmp_path: Path) -> None:
    values = tensors()
    names = sorted(values)
    placed = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: values[name] for name in names if placed[name] == file}, tmp_path / file)
    # A file that the index does not name is not read: some repositories keep an original copy beside.
    save_file({"q": torch.zeros(9, 9)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    params = parameters()
    load(tmp_path, params)
    check(params, values)


def test_tensors_larger_than_a_buffer_are_cut_and_all_of_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", 40)  # less than two rows of most tensors
    values = tensors()
    save_file(values, tmp_path / "model.safetensors")
    params, reports = parameters(), []
    loader.load(params, Checkpoint.open(tmp_path), RULES, progress=lambda *report: reports.append(report))
    check(params, values)
    total = sum(value.numel() * 4 for value in values.values())
    assert reports[-1] == (total, total)
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"k": None}, r"missing: k"),
        ({"extra.weight": torch.zeros(2)}, r"not part of this model: extra\.weight"),
        ({"v": torch.zeros(3, 6)}, r"misshapen: v \[3, 6\], needed \[2, 6\]"),
        ({"k": torch.zeros(3, 6), "v": torch.zeros(1, 6)}, r"misshapen: k \[3, 6\], needed \[2, 6\]; misshapen: v"),
        ({"e0.gate": torch.zeros(4, 6), "e0.up": torch.zeros(2, 6)}, r"misshapen: e0\.gate \[4, 6\], needed \[3, 6\]"),
        ({"v": torch.zeros(2, 5)}, r"misshapen: v \[2, 5\], needed \[2, 6\]"),
        ({"model.embed": torch.zeros(6, 10)}, r"misshapen: model\.embed \[6, 10\], needed \[10, 6\]"),
        ({"q": torch.zeros(4, 6, dtype=torch.int8)}, r"wrong dtype: q is int8, needed float32"),
        ({"q": torch.zeros(4, 6, dtype=torch.float8_e4m3fn)}, r"wrong dtype: q is float8_e4m3fn"),
        ({"k": torch.tensor(1.0)}, r"misshapen: k \[\], needed \[2, 6\]"),
        ({"e1.down": torch.zeros(3, 6)}, r"misshapen: e1\.down \[3, 6\], needed \[6, 3\]"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_read(
    tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    values = {name: value for name, value in {**tensors(), **change}.items() if value is not None}
    save_file(values, tmp_path / "model.safetensors")
    params = parameters()
    with pytest.raises(WeightsError, match=said):
        load(tmp_path, params)
    assert all(torch.isnan(param).all() for param in params.values())


def test_everything_wrong_is_said_at_once(tmp_path: Path) -> None:
    values = {**tensors(), "extra": torch.zeros(1), "v": torch.zeros(2, 5)}
    del values["e0.gate"]
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"misshapen: v .*missing: e0\.gate.*not part of this model: extra"):
        load(tmp_path, parameters())


def test_known_unused_tensors_are_left_out(tmp_path: Path) -> None:
    values = {**tensors(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4), "lm_head": torch.zeros(1)}
    save_file(values, tmp_path / "model.safetensors")
    params = parameters()
    load(tmp_path, params, unused=("lm_head",))
    check(params, tensors())


def test_a_parameter_without_a_rule_is_a_fault_of_the_family(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="no rule fills the parameters bias"):
        load(tmp_path, {**parameters(), "bias": torch.zeros(2)})


def test_a_tied_head_may_be_stored_again_and_must_then_be_the_same(tmp_path: Path) -> None:
    same = {**tensors(), "lm_head": tensors()["model.embed"]}
    save_file(same, tmp_path / "model.safetensors")
    params, copies = parameters(), {"lm_head": "model.embed"}
    loader.load(params, Checkpoint.open(tmp_path), RULES, copies=copies)
    check(params, tensors())
    save_file({**same, "lm_head": same["lm_head"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lm_head is model\.embed .*set tie_word_embeddings to false"):
        loader.load(parameters(), Checkpoint.open(tmp_path), RULES, copies=copies)


def test_ids_out_of_their_range_are_refused(tmp_path: Path) -> None:
    save_file({"table": torch.tensor([[0, 3], [4, 1]])}, tmp_path / "model.safetensors")
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(WeightsError, match="table holds ids outside of 0 to 3"):
        loader.load({"table": table}, Checkpoint.open(tmp_path), [Rule("table", ("table",))], bounds={"table": 4})


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('"q": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}', "entry for q is broken"),
        ('"q": {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]}', "entry for q is broken"),
        ('"q": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}', "entry for q is broken"),
        ('"q": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}', "dtype F4, which is not implemented"),
        ('"q": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "q": {}', "names q more than once"),
        (
            '"q": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, '
            '"k": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}',
            "tensors q and k lie in the same bytes",
        ),
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: str, said: str) -> None:
    header = b"{" + entry.encode() + b"}"
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(WeightsError, match=said):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": ["a"]}', '{"weight_map": {"q": 5}}', "[" * 100000])
def test_an_index_that_is_none(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("keep", [4, 100, -7])
def test_a_file_cut_short(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model\.safetensors.*cut short"):
        Checkpoint.open(tmp_path)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors file"):
        Checkpoint.open(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 5) + b"{nope" + b"\0" * 20)
    with pytest.raises(WeightsError, match="no readable JSON"):
        Checkpoint.open(tmp_path)


def test_an_index_that_lies(tmp_path: Path) -> None:
    save_file({"q": torch.zeros(2)}, tmp_path / "a.safetensors")
    index = {"weight_map": {"q": "a.safetensors", "k": "a.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="lists tensors that its files do not hold: k"):
        Checkpoint.open(tmp_path)
    index["weight_map"]["k"] = "b.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"b\.safetensors cannot be read"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"q": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match="tensor q is stored in both"):
        Checkpoint.open(tmp_path)


def test_shared_experts_stand_behind_the_others_in_parts(tmp_path: Path) -> None:
    sizes = {"e.gate": (3, 6), "e.up": (3, 6), "s.gate": (6, 6), "s.up": (6, 6), "e.down": (6, 3), "s.down": (6, 6)}
    stored = {name: torch.randn(size) for name, size in sizes.items()}
    save_file(stored, tmp_path / "model.safetensors")
    filled = {"up": torch.full((3, 6, 6), float("nan")), "down": torch.full((3, 6, 3), float("nan"))}
    rules = [
        Rule("up", ("e.gate", "e.up", "s.gate", "s.up"), SharedBehindConcat()),
        Rule("down", ("e.down", "s.down"), SharedBehind()),
    ]
    loader.load(filled, Checkpoint.open(tmp_path), rules)
    assert torch.equal(filled["up"][0], torch.cat((stored["e.gate"], stored["e.up"])))
    assert torch.equal(filled["down"][0], stored["e.down"])
    for i in range(2):
        rows = slice(3 * i, 3 * i + 3)
        assert torch.equal(filled["up"][1 + i], torch.cat((stored["s.gate"][rows], stored["s.up"][rows])))
        assert torch.equal(filled["down"][1 + i], stored["s.down"][:, rows])


def test_shared_experts_of_another_width_are_named(tmp_path: Path) -> None:
    save_file({"e.down": torch.zeros(6, 3), "s.down": torch.zeros(6, 5)}, tmp_path / "model.safetensors")
    filled = {"down": torch.zeros(3, 6, 3)}
    with pytest.raises(WeightsError, match=r"misshapen: s.down \[6, 5\], needed \[6, 6\]"):
        loader.load(filled, Checkpoint.open(tmp_path), [Rule("down", ("e.down", "s.down"), SharedBehind())])
