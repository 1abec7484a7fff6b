"""Headers of GGUF files, against the gguf package's writer and its tables; broken files are sentences, at once."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gguf_file import FORMATS, MAX_ITEMS, MAX_KEYS, MAX_TENSORS, GgufError, open_gguf
from engine.serving.launch.repository import AddError, add


def write(path: Path, split: int = 0) -> dict[str, np.ndarray]:
    """A file of the package's writer with tensors of Q8_0, F32 and F16. Returns their stored arrays."""
    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=split)
    writer.add_block_count(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_add_bos_token(True)
    writer.add_token_list(["<s>", "é", "▁a"])
    writer.add_token_scores([0.5, -1.0, 0.0])
    writer.add_token_types([3, 1, 1])
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    q8 = gguf.quants.quantize(values, GGMLQuantizationType.Q8_0)
    stored = {
        "blk.0.attn_q.weight": q8,
        "output_norm.weight": values[0],
        "token_embd.weight": values.astype(np.float16),
    }
    for name, array in stored.items():
        raw = GGMLQuantizationType.Q8_0 if array is q8 else None
        writer.add_tensor(name, array, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def test_formats_have_the_sizes_of_the_packages_table() -> None:
    for number, block in FORMATS.items():
        kind = GGMLQuantizationType(number)
        assert (block.name, (block.num_values, block.num_bytes)) == (kind.name, GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize("split", [0, 1])
def test_metadata_and_bytes_are_those_written(tmp_path: Path, split: int) -> None:
    stored = write(tmp_path / "m.gguf", split)
    opened = open_gguf(tmp_path / ("m-00001-of-00003.gguf" if split else "m.gguf"))
    assert opened.architecture == "llama"
    assert opened.metadata["llama.block_count"] == 2
    assert opened.metadata["llama.rope.freq_base"] == 10_000.0
    assert opened.metadata["tokenizer.ggml.add_bos_token"] is True
    assert opened.metadata["tokenizer.ggml.tokens"] == ("<s>", "é", "▁a")
    assert opened.metadata["tokenizer.ggml.scores"] == (0.5, -1.0, 0.0)
    assert sorted(opened.tensors) == sorted(stored)
    for name, tensor in opened.tensors.items():
        raw = tensor.file.read_bytes()[tensor.start : tensor.start + tensor.num_bytes]
        assert raw == stored[name].tobytes()
    assert opened.tensors["blk.0.attn_q.weight"].shape == (6, 64)
    assert opened.tensors["blk.0.attn_q.weight"].format.name == "Q8_0"


def test_a_file_that_cannot_be_served_is_refused_and_nothing_written(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for file, why in (
        ("m.gguf", "tokenizer.ggml.model is missing; gpt2 and llama"),
        ("broken.gguf", "cut short"),
        ("absent.gguf", "cannot be read"),
    ):
        with pytest.raises(AddError, match=why):
            add(tmp_path / file, "m", tmp_path / "r", settings={}, tokenizer=True, ensemble=True, frontends=1)
    assert not (tmp_path / "r").exists()


def test_a_missing_or_later_file_of_several_is_named(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", 1)
    with pytest.raises(GgufError, match=r"not the first of its 3 files: give m-00001-of-00003.gguf"):
        open_gguf(tmp_path / "m-00002-of-00003.gguf")
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(GgufError, match=r"m-00003-of-00003.gguf cannot be read"):
        open_gguf(tmp_path / "m-00001-of-00003.gguf")


def header(tensors: int = 0, keys: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


ENDLESS = text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 60)
NESTED = text(b"k") + struct.pack("<IIQ", 9, 9, 1) * 4
TWICE = (text(b"k") + struct.pack("<II", 4, 1)) * 2


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "is no GGUF file"),
        (b"PK\3\4" + bytes(64), "is no GGUF file"),
        (header()[:12], "cut short"),
        (header(version=2), "is GGUF version 2; version 3"),
        (header(version=3 << 24), "big-endian"),
        (header(tensors=1 << 63), f"at most {MAX_TENSORS}"),
        (header(keys=1 << 63), f"at most {MAX_KEYS}"),
        (header(keys=1, rest=ENDLESS), f"at most {MAX_ITEMS}"),
        (header(keys=1, rest=NESTED), "array of arrays"),
        (header(keys=1, rest=text(b"k") + struct.pack("<I", 77)), "value type 77"),
        (header(keys=1, rest=struct.pack("<Q", 1 << 62)), "cut short"),
        (header(keys=1, rest=text(b"\xff")), "not UTF-8"),
        (header(keys=2, rest=TWICE), "more than once"),
        (header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)), "alignment is 0"),
        (header(1, rest=tensor(b"t", (1,) * 5)), "has 5 dimensions"),
        (header(1, rest=tensor(b"t", ())), "has 0 dimensions"),
        (header(1, rest=tensor(b"t", (0,))), "wants rows of whole blocks"),
        (header(1, rest=tensor(b"t", (33,), kind=8)), "Q8_0 wants rows of whole blocks of 32"),
        (header(1, rest=tensor(b"t", (256,), kind=16)), "type number 16, which is not implemented"),
        (header(1, rest=tensor(b"t", (8,), offset=4)), "no multiple of the file's alignment"),
        (header(1, rest=tensor(b"t", (1 << 63,) * 4)), "bytes of tensor t are missing"),
        (header(1, rest=tensor(b"t", (8,), offset=1 << 63)), "bytes of tensor t are missing"),
        (header(2, rest=tensor(b"a", (8,)) + tensor(b"b", (8,)) + bytes(99)), "a and b lie in the same bytes"),
        (header(2, rest=tensor(b"a", (8,)) + tensor(b"a", (8,), 0, 32) + bytes(199)), "a is stored twice"),
    ],
)
def test_a_hostile_file_is_refused_with_a_sentence(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(GgufError, match=why):
        open_gguf(tmp_path / "x.gguf")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("g") / "m.gguf"
    write(path)
    return path


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_bytes_are_read_or_refused(written: Path, data: st.DataObject) -> None:
    raw = bytearray(written.read_bytes())
    for at in data.draw(st.lists(st.integers(0, 600), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    changed = written.with_name("changed.gguf")
    changed.write_bytes(raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))])
    try:
        opened = open_gguf(changed)
    except GgufError:
        return
    size = changed.stat().st_size
    assert all(t.start >= 0 and t.start + t.num_bytes <= size for t in opened.tensors.values())
