"""A vocabulary of which each rank holds a run of rows: the embedding's lookup, and what ranks say of their logits.

The last run may be shorter. Ranks put candidates together, or logits, and every rank draws the same token from the same
bits.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.parallel.communicator import Communicator


class Vocabulary:
    """`total` ids, of which this rank holds `count` from `start` on.

    merges: draws come from candidates of the ranks, where these say enough.
    """

    def __init__(self, total: int, communicator: Communicator, merges: bool = True) -> None:
        self.total = total
        self.merges = merges and communicator.size > 1
        run = -(-total // communicator.size)
        self.start = min(total, communicator.rank * run)
        self.count = min(total, self.start + run) - self.start
        self._run = run
        self._communicator = communicator

    def own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [T] → the rows that they have here [T], any for those of other ranks; whether they are here [T, 1]."""
        local = ids - self.start
        here = (local >= 0) & (local < self.count)
        return local.clamp(0, self.count - 1), here[:, None]

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """Which of the ids are here."""
        return (ids >= self.start) & (ids < self.start + self.count)

    def local(self, ids: np.ndarray) -> np.ndarray:
        """The rows of those of the ids [N] that are here."""
        return ids[self.holds(ids)] - self.start

    def sum(self, rows: torch.Tensor, here: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, hidden] of ids that each are on one rank."""
        return self._communicator.all_reduce(torch.where(here, rows, 0))

    def gather(self, words: torch.Tensor) -> torch.Tensor:
        """What each rank says of B sequences, [B, C] → of all ranks in turn [ranks, B, C]."""
        return self._communicator.all_gather(words)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of this rank's tokens [B, count] → of all [B, total]."""
        if self._communicator.size == 1:
            return logits
        padded = torch.nn.functional.pad(logits, (0, self._run - self.count))
        return self._communicator.all_gather(padded).transpose(0, 1).flatten(1)[:, : self.total].contiguous()
