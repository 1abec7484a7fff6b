"""Drawing the next token from what the parts of a vocabulary say of it (`sample_candidates`)."""

from __future__ import annotations

import torch

from kernels.sample.reference import COLDEST, gumbel_of
from kernels.sample_candidates.reference import HEAD, MAX_TOP_K


def sample_merge(
    words: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    vocab: int,
) -> torch.Tensor:
    """The token that `sample` draws from the logits of all parts.

    words [N, B, 132] int32 of N parts, in the order of their tokens; the rest as for `sample`, which gives the same →
    [B] int64. A sequence whose filters are top_p or min_p without 0 < top_k ≤ 64, or a larger top_k below `vocab`, is
    drawn without them.
    """
    temperature, top_k, top_p, min_p, seeds = (of[rows] for of in (temperature, top_k, top_p, min_p, seeds))
    best, value = words[:, :, 0].T.long(), words[:, :, 1].T.contiguous().view(torch.float32)
    drawn = temperature >= COLDEST
    heat = torch.where(drawn, temperature, 1.0)[:, None]
    noise = torch.where(drawn[:, None], gumbel_of(seeds, positions, best), 0.0)
    # The first of equal scores is that of the lowest id.
    winner = (value / heat + noise).argmax(dim=-1, keepdim=True)
    tokens, top = best.gather(1, winner)[:, 0], value.gather(1, winner)[:, 0]
    finite = torch.isfinite(top)
    filtered = drawn & finite & (top_k > 0) & (top_k <= MAX_TOP_K) & (top_k < vocab)
    for i in filtered.nonzero().flatten().tolist():
        ids = words[:, i, HEAD + MAX_TOP_K :].flatten()
        x = words[:, i, HEAD : HEAD + MAX_TOP_K].flatten().view(torch.float32)
        count = (ids >= 0).double().view(len(words), -1)
        count[:, -1] *= words[:, i, 2]
        here = (ids >= 0).nonzero().squeeze(1)
        ids, x, count = ids[here], x[here], count.flatten()[here]
        x, order = x.sort(descending=True, stable=True)
        ids, count = ids[order], count[order]
        scaled = (x - x[0]) / heat[i]
        place = int((count.cumsum(0) < top_k[i]).sum())
        kept = x >= x[min(place, len(x) - 1)]
        kept &= scaled >= torch.where(min_p[i] > 0, min_p[i].log(), float("-inf"))
        if top_p[i] < 1:
            mass = (torch.where(kept, scaled.exp(), 0.0).double() * count).cumsum(0)
            larger = torch.cat((mass.new_zeros(1), mass[:-1]))
            nucleus = int((larger < top_p[i].double() * mass[-1]).sum())
            kept &= x >= x[max(nucleus, 1) - 1]
        score = x / heat[i] + gumbel_of(seeds[i : i + 1], positions[i : i + 1], ids[None])[0]
        score = score.masked_fill(~kept, float("-inf"))
        tokens[i] = ids[score == score.max()].min()
    return torch.where(finite, tokens, -1)
