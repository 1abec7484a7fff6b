"""Read the files of a checkpoint, which somebody else made: regular ones alone, and no more of them than a bound."""

from __future__ import annotations

import errno
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Of an index that names the files of a checkpoint's weights.
MAX_INDEX_BYTES = 32 << 20


def open_regular(file: Path) -> BinaryIO:
    """`file` to be read. Raises OSError, also of a pipe, a device or a folder: reading those might never end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe without a writer opens at once so
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(descriptor, "rb")


def read(file: Path, most: int) -> bytes:
    """All bytes of `file`. Raises OSError as `open_regular` does, and when there are more than `most`."""
    with open_regular(file) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it holds more than {most} bytes")
    return data


@dataclass(frozen=True)
class Header:
    """Of a safetensors file. text: its JSON, as much of it as was asked for. length: of all of it. size: the file's, in
    bytes; the numbers of tensors begin behind 8 + length."""

    text: bytes
    length: int
    size: int


def safetensors_header(file: Path, most: int) -> Header | None:
    """Up to `most` bytes of it; None where the file ends before its header does. Raises OSError as `open_regular`."""
    with open_regular(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        return Header(stream.read(min(length, most)), length, size) if length <= size - 8 else None
