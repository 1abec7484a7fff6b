"""TensorRT-LLM's lists of words as token ids: one array INT32 `[2, n]` a request.

Line 0 has the ids of all words one behind the other, filled up with 0; line 1 where each word ends, filled up with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.types import RequestError

MAX_WORDS = 64
MAX_IDS = 1024  # of all words of a list together

Words = tuple[tuple[int, ...], ...]


def unpacked(name: str, array: npt.NDArray[Any]) -> Words:
    """The words in a tensor `name` of shape [2, n]. Raises RequestError."""
    ids, ends = array.reshape(2, -1).tolist()
    used = [end for end in ends if end != -1]
    if len(used) > MAX_WORDS or (used and max(used) > MAX_IDS):
        raise RequestError(f"{name} has more than {MAX_WORDS} words or {MAX_IDS} tokens")
    if ends[: len(used)] != used or any(a >= b for a, b in zip([0, *used], used, strict=False)):
        raise RequestError(f"{name}: the second line must hold rising ends of words and then -1")
    if used and used[-1] > len(ids):
        raise RequestError(f"{name}: a word ends at {used[-1]}, but there are {len(ids)} tokens")
    return tuple(tuple(ids[a:b]) for a, b in zip([0, *used], used, strict=False))


def packed(lists: Sequence[Sequence[Sequence[int]]]) -> npt.NDArray[np.int32]:
    """INT32 [b, 2, n] of b lists of words; words without tokens are left out, n is 0 where there are none."""
    kept = [[word for word in words if word] for words in lists]
    width = max((sum(map(len, words)) for words in kept), default=0)
    found = np.zeros((len(kept), 2, width), np.int32)
    found[:, 1] = -1
    for row, words in zip(found, kept, strict=True):
        ids = [i for word in words for i in word]
        row[0, : len(ids)] = ids
        row[1, : len(words)] = np.cumsum([len(word) for word in words], dtype=np.int32)
    return found
