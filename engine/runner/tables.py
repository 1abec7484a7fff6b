"""Tables that live on the device between steps, one row a running request: token ids, block ids and sampling
parameters.

They are views of one int32 arena, so that everything a plan changes (a new row's prompt, its parameters, block ids)
is one scatter of (word, value) pairs. The last row is the dummy: padding points at it, and it points at block 0.
"""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from engine.cache.spec import PoolSpec, Recurrent
from engine.cache.writes import BlockWrite
from engine.core.plan import RowStart
from engine.sampling.params import NUM_LONG, NUM_PARAMS, RowParams, long_words, param_words

Words = npt.NDArray[np.int32]
Change = tuple[Words, Words]


class RowTables:
    """tokens [rows, max_model_len + 1] int32: a row's prompt, then what it generated.
    blocks   one [rows, entries] int32 a group: the row's block ids in order (no entries for recurrent groups).
    params   [rows] each: sampling parameters, as engine.sampling.params lays them out.
    lengths  [rows] int32: tokens that a row truly holds. Kept by engines that draft; otherwise the plans say it.

    `rows` counts the dummy, which is the last.
    """

    def __init__(self, max_rows: int, max_model_len: int, pool: PoolSpec, device: torch.device) -> None:
        self.dummy = max_rows
        rows = max_rows + 1
        entries = [
            0 if isinstance(group.spec, Recurrent) else -(-max_model_len // pool.block_size) for group in pool.groups
        ]
        # first of all pairs of words, which are aligned there as the int64 that they are
        shapes = [
            (2 * NUM_LONG, rows),
            (rows, max_model_len + 1),
            (NUM_PARAMS, rows),
            *((rows, n) for n in entries),
            (rows,),
        ]
        sizes = [math.prod(shape) for shape in shapes]
        if sum(sizes) >= 2**31:
            raise ValueError(
                f"{max_rows} rows of {max_model_len} tokens need tables of {sum(sizes)} words, more than 2**31: "
                "lower scheduler.max_rows or max_model_len"
            )
        self.arena = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        parts = [part.view(shape) for part, shape in zip(self.arena.split(sizes), shapes, strict=True)]
        pairs, self.tokens, words = parts[:3]
        self.params = RowParams.of(words, pairs.view(NUM_LONG, 2 * rows).view(torch.int64))
        self.blocks, self.lengths = tuple(parts[3:-1]), parts[-1]
        self._widths = [max_model_len + 1, rows, *entries]
        self._starts = np.cumsum(sizes)[:-1].tolist()
        # Of a row's parameters, then its length: the words of row 0, and how far those of the next row are from them.
        params = self._starts[1] + rows * np.arange(NUM_PARAMS)
        long = np.add.outer(2 * rows * np.arange(NUM_LONG), np.arange(2)).ravel()
        self._row_words = np.concatenate((params, long, (self._starts[-1],)), dtype=np.int32)
        self._row_steps = np.repeat(np.array((1, 2, 1), np.int32), (NUM_PARAMS, 2 * NUM_LONG, 1))

    def start(self, start: RowStart) -> Change:
        """The words that a row start changes: its row of the token table, its parameters and its length."""
        at, count = self._starts[0] + start.row * self._widths[0], len(start.token_ids)
        own = self._row_words + start.row * self._row_steps
        words = np.concatenate((np.arange(at, at + count), own), dtype=np.int32)
        values = (start.token_ids, param_words(start), long_words(start).ravel(), (count,))
        return words, np.concatenate(values, dtype=np.int32)

    def block_writes(self, writes: list[BlockWrite]) -> Change:
        """The words that block writes change."""
        counts = [len(w.blocks) for w in writes]
        starts = [self._starts[2 + w.group] + w.row * self._widths[2 + w.group] + w.index for w in writes]
        runs = (range(start, start + count) for start, count in zip(starts, counts, strict=True))
        size = sum(counts)
        words = np.fromiter(chain.from_iterable(runs), np.int32, size)
        return words, np.fromiter(chain.from_iterable(w.blocks for w in writes), np.int32, size)
