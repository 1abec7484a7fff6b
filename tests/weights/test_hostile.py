"""Checkpoints that somebody made to do harm: each is refused with a sentence before it costs much."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.weights.checkpoint import DTYPES, Checkpoint, WeightsError

ONE = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'


def file_of(header: str | bytes, data: bytes = b"") -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + data


def write(folder: Path, header: str | bytes) -> None:
    (folder / "model.safetensors").write_bytes(file_of(header))


def duplicates(folder: Path) -> None:
    write(folder, "{" + ",".join(f'"t{i // 2}":{ONE}' for i in range(40_000)) + "}")


def many_tensors(folder: Path) -> None:
    write(folder, "{" + ",".join(f'"t{i}":{ONE}' for i in range(200_000)) + "}")


def long_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", 90 << 20))
        stream.truncate(91 << 20)


def many_dimensions(folder: Path) -> None:
    write(folder, json.dumps({"t": {"dtype": "F32", "shape": [2**60] * 200_000, "data_offsets": [0, 4]}}))


def large_dimensions(folder: Path) -> None:
    write(folder, json.dumps({"t": {"dtype": "F32", "shape": [10**4000] * 8, "data_offsets": [0, 4]}}))


def deep(folder: Path) -> None:
    write(folder, "[" * 1_000_000)


def long_name(folder: Path) -> None:
    write(folder, f'{{"{"x" * 1_000_000}":{ONE.replace("F32", "Q9" * 100_000)}}}')


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors")


def device(folder: Path) -> None:
    (folder / "model.safetensors").symlink_to("/dev/zero")


def a_folder(folder: Path) -> None:
    (folder / "model.safetensors").mkdir()


def index_pipe(folder: Path) -> None:
    os.mkfifo(folder / "model.safetensors.index.json")


def long_index(folder: Path) -> None:
    with (folder / "model.safetensors.index.json").open("wb") as stream:
        stream.truncate(64 << 20)


def many_files(folder: Path) -> None:
    placed = {f"t{n}": f"f{n}.safetensors" for n in range(20_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (duplicates, r"names t0, t1, .* and 19992 more more than once"),
        (many_tensors, "holds 200000 tensors; at most 100000"),
        (long_header, "has a header of 94371840 bytes; at most 16777216"),
        (many_dimensions, "tensor t has 200000 dimensions; at most 8"),
        (large_dimensions, "the bytes of tensor t are missing"),
        (deep, "holds no readable JSON"),
        (long_name, "tensor x+.* has dtype Q9Q9"),
        (pipe, "cannot be read: it is no regular file"),
        (device, "cannot be read: it is no regular file"),
        (a_folder, "cannot be read"),
        (index_pipe, "cannot be read: it is no regular file"),
        (many_files, "names 20000 files; at most 10000"),
        (long_index, "cannot be read: it holds more than 33554432 bytes"),
    ],
)
def test_a_hostile_header_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], sentence: str) -> None:
    make(tmp_path)
    began = time.monotonic()
    with pytest.raises(WeightsError, match=sentence) as caught:
        Checkpoint.open(tmp_path)
    assert time.monotonic() - began < 10  # a second or less by itself; some took half a minute, and some for ever
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/model.safetensors", "a/b", "..", "", "x\0y"])
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(WeightsError, match="only files of the same folder are read"):
        Checkpoint.open(tmp_path)


def opened(files: dict[str, bytes]) -> Checkpoint | WeightsError:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            (Path(folder) / name).write_bytes(data)
        try:
            return Checkpoint.open(folder)
        except WeightsError as error:
            return error


NUMBERS = st.integers(-2, 9) | st.integers() | st.floats() | st.none() | st.text(max_size=2)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPES, "F7"]) | NUMBERS,
        "shape": st.lists(NUMBERS, max_size=10) | NUMBERS,
        "data_offsets": st.lists(NUMBERS, max_size=3) | NUMBERS,
        "more": NUMBERS,
    },
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__", ""]), ENTRIES | NUMBERS, max_size=3)


@given(HEADERS, st.binary(max_size=64))
@settings(deadline=None)
def test_any_header_is_read_or_refused(header: dict[str, Any], data: bytes) -> None:
    found = opened({"model.safetensors": file_of(json.dumps(header), data)})
    if isinstance(found, Checkpoint):
        assert all(0 <= entry.num_bytes <= len(data) for entry in found.entries.values())


@given(st.binary(max_size=64), st.none() | st.binary(max_size=64))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes, index: bytes | None) -> None:
    files = {"model.safetensors": data} | ({} if index is None else {"model.safetensors.index.json": index})
    assert isinstance(opened(files), Checkpoint | WeightsError)
