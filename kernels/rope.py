"""What turns queries and keys, as every op sees it that does so."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021, arXiv:2104.09864), and the norms of query and key heads before it.

    cos_sin         [P, R] float32  cos in the first R/2 columns; channels past R pass through
    q_norm, k_norm  [D]             weights of a head's RMS norm with `eps` and `offset` as in `rms_norm`; None: no norm
    interleaved     turned pairs are (2i, 2i + 1), else (i, i + R/2)
    """

    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6
    offset: float = 0.0
    interleaved: bool = False
