"""How many drafts of each entry stand, and how long its row is from then on."""

from __future__ import annotations

import torch


def accept_drafts(
    drawn: torch.Tensor,
    ids: torch.Tensor,
    last: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    out_rows: torch.Tensor,
    row_lengths: torch.Tensor,
    depth: int,
) -> torch.Tensor:
    """An entry draws behind its last own token, at place s_b = last_b − counts_b of the step, and behind each draft. A
    draft stands while all before it do and it equals the token that is drawn in its place (Daliri, Musco and Suresh
    2024, arXiv:2408.07978):

        accepted_b = the most a ≤ counts_b with ids[s_b + j] = drawn[s_b + j − 1] for all 0 < j ≤ a
        given_b = accepted_b + 1, one less where accepted_b > 0 and drawn[s_b + accepted_b] < 0
        row_lengths[out_rows_b] = lengths_b − counts_b + given_b

    drawn, ids [T] int32 are of the step's tokens: drawn behind, −1 for nothing, and computed. last, counts, lengths,
    out_rows [B] int32, counts ≤ depth; row_lengths [R] int32, written in place: of entries that share a row any may
    win.
    Returns [2, B] int32: given, and the place of the last token that is kept, s_b + given_b − 1.
    """
    within = torch.arange(1 + depth, dtype=torch.int32, device=drawn.device)
    first = last - counts
    places = (first[:, None] + within).clamp(max=len(drawn) - 1)
    run = drawn[places]
    equal = (run[:, :-1] == ids[places[:, 1:]]) & (within[1:] <= counts[:, None])
    accepted = equal.int().cumprod(1).sum(1, keepdim=True)
    lost = (run.gather(1, accepted) < 0) & (accepted > 0)
    given = (accepted + 1 - lost.int())[:, 0].int()
    row_lengths[out_rows] = lengths - counts + given
    return torch.stack((given, first + given - 1))
