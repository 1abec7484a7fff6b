"""What a part of the vocabulary has to say of the next draw, in a few words: parts are put together by `sample_merge`.

The token that wins without filters, and for a sequence with top_k the part's k largest logits: the k largest of all are
among those of the parts, and min_p and top_p choose among these.
"""

from __future__ import annotations

import torch

from kernels.sample.reference import COLDEST, gumbel

# A sequence with more of top_k, or with top_p or min_p alone, is drawn from whole logits (`sample`).
MAX_TOP_K = 64
HEAD = 4
WORDS = HEAD + 2 * MAX_TOP_K


def sample_candidates(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first: int,
    vocab: int,
) -> torch.Tensor:
    """Of the tokens first … first + C − 1 among `vocab`, for each sequence [B, 132] int32:

        0, 1      the token that wins without filters, and its logit
        2         how many tokens have the last logit that top_k keeps
        3         0
        4 … 67    logits of the candidates, float32 bit by bit
        68 … 131  their tokens, −1 where there is none

    Candidates are there for a sequence with 0 < top_k ≤ 64, top_k < vocab and temperature ≥ 1e-5: tokens whose logit is
    above the top_k-th largest of the part (or, with fewer tokens, above the smallest), by ascending id; and as the last
    one, for all tokens of that logit, the one among them that wins. Tokens at −∞ are none. Noise is that of `sample`.

    logits [B, C] (float32, bfloat16 or float16), a NaN counts as +∞; rows, positions [B] int32; temperature [R]
    float32; top_k [R] int32; seeds [R] int64. A sequence with +∞ in the part has no candidates.
    """
    temperature, top_k, seeds = (of[rows] for of in (temperature, top_k, seeds))
    x = logits.float()
    x = torch.where(x.isnan(), float("inf"), x)
    size = x.shape[1]
    drawn = temperature >= COLDEST
    scores = x.clone()
    some = drawn.nonzero().squeeze(1)
    if some.numel():
        scores[some] = x[some] / temperature[some, None] + gumbel(seeds[some], positions[some], size, first)
    words = torch.zeros((len(x), WORDS), dtype=torch.int32, device=x.device)
    best = scores.argmax(dim=-1)
    words[:, 0] = first + best
    words[:, 1] = _bits(x.gather(1, best[:, None]))[:, 0]
    words[:, HEAD + MAX_TOP_K :] = -1
    filtered = drawn & (top_k > 0) & (top_k <= MAX_TOP_K) & (top_k < vocab) & (x.amax(dim=-1) < float("inf"))
    for i in filtered.nonzero().flatten().tolist():
        last = x[i].sort(descending=True).values[min(int(top_k[i]), size) - 1]
        above = (x[i] > last).nonzero().squeeze(1)
        at = torch.arange(len(above), device=x.device)
        equal = (x[i] == last).nonzero().squeeze(1)
        if last > float("-inf"):
            words[i, 2] = len(equal)
            above = torch.cat((above, equal[scores[i, equal].argmax()][None]))
            at = torch.cat((at, torch.tensor([MAX_TOP_K - 1], device=x.device)))
        words[i, HEAD + at] = _bits(x[i, above])
        words[i, HEAD + MAX_TOP_K + at] = (first + above).int()
    return words


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)
