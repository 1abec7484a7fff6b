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

    def start(self, start: RowStart) -> Change:
        """The words that a row start changes: its row of the token table, its parameters and its length."""
        at = self._starts[0] + start.row * self._widths[0]
        words = (
            np.arange(at, at + len(start.token_ids)),
            self._starts[1] + start.row + self._widths[1] * np.arange(NUM_PARAMS),
            (2 * (start.row + self._widths[1] * np.arange(NUM_LONG))[:, None] + np.arange(2)).ravel(),
            (self._starts[-1] + start.row,),
        )
        values = (start.token_ids, param_words(start), long_words(start).ravel(), (len(start.token_ids),))
        return np.concatenate(words, dtype=np.int32), np.concatenate(values, dtype=np.int32)

    def block_writes(self, writes: list[BlockWrite]) -> Change:
        """The words that block writes change."""
        starts = [self._starts[2 + w.group] + w.row * self._widths[2 + w.group] + w.index for w in writes]
        counts = [len(w.blocks) for w in writes]
        run = np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
        words = np.repeat(np.array(starts), counts) + run
        return words.astype(np.int32), np.fromiter(chain.from_iterable(w.blocks for w in writes), np.int32, len(words))
