"""Drawing the next token: filters, then the Gumbel-max trick with counter-based noise (Salmon et al. 2011, Philox)."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

# Token ids that share a Philox call lie RUN apart, so that a kernel reads whole runs: 4 words, 4 runs.
RUN = 1024
LARGEST_UNIFORM = 1.0 - 2.0**-24

# Below this temperature the argmax is taken: dividing by less could overflow.
COLDEST = 1e-5


def philox(seed: torch.Tensor, counter: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of counter (c0, c1, 0, 0) under the 64-bit key `seed`: four int64 tensors of 32-bit words.

    Words 0 and 2 stand in one tensor, 1 and 3 in another. Products of int64 wrap around: all 64 bits are there, as
    those of a signed number.
    """
    c0, c1 = (torch.stack((part & _WORD, torch.zeros_like(part))) for part in counter)
    shape = (2,) + (1,) * seed.dim()
    multipliers, weyl = (torch.tensor(pair, device=seed.device).view(shape) for pair in (_MULTIPLIERS, _WEYL))
    key = torch.stack((seed & _WORD, (seed >> 32) & _WORD))
    for _ in range(_ROUNDS):
        product = (c0 * multipliers).flip(0)
        c0, c1 = ((product >> 32) & _WORD) ^ c1 ^ key, product & _WORD
        key = (key + weyl) & _WORD
    return c0[0], c1[0], c0[1], c1[1]


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab: int, first: int = 0) -> torch.Tensor:
    """Standard Gumbel noise keyed by (seed, position, token id), of the `vocab` ids from `first` on: seeds, positions
    [B] → [B, vocab] float32.

    −log E with E = −log(1 − u) exponential: the noise that decides comes from small u, where float32 is finest.
    """
    if first + vocab <= RUN:
        return gumbel_of(
            seeds, positions, torch.arange(first, first + vocab, device=seeds.device).expand(len(seeds), -1)
        )
    before, tiles = first // (4 * RUN), -(-(first + vocab) // (4 * RUN))
    counters = torch.arange(before * RUN, tiles * RUN, device=seeds.device)[None]
    position = positions.long()[:, None].expand(-1, counters.shape[1])
    words = philox(seeds.long()[:, None], (counters.expand_as(position), position))
    word = torch.stack([w.view(-1, tiles - before, RUN) for w in words], dim=2).flatten(1)
    lead = first - before * 4 * RUN
    return _noise(word[:, lead : lead + vocab])


def gumbel_of(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The same noise of the tokens ids [B, N] → [B, N] float32."""
    ids = ids.long()
    counters = ids // (4 * RUN) * RUN + ids % RUN
    words = philox(seeds.long()[:, None], (counters, positions.long()[:, None].expand_as(ids)))
    return _noise(torch.stack(words).gather(0, (ids // RUN % 4)[None])[0])


def _noise(word: torch.Tensor) -> torch.Tensor:
    u = (word.float() * 2.0**-32).clamp(2.0**-33, LARGEST_UNIFORM)
    exponential = torch.where(u < 2.0**-10, u * (1 + u * (0.5 + u * (1 / 3))), -torch.log(1 - u))
    return -torch.log(exponential)


def keep(
    x: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Which tokens survive the filters: x [B, V] float32, the rest [B], every temperature positive → [B, V] bool."""
    vocab = x.shape[1]
    scaled = (x - x.amax(dim=-1, keepdim=True)) / temperature[:, None]
    kept = scaled >= torch.where(min_p > 0, min_p.log(), float("-inf"))[:, None]
    order = x.sort(dim=-1, descending=True).values
    k = torch.where((top_k <= 0) | (top_k > vocab), vocab, top_k).long()
    kept &= x >= order.gather(1, k[:, None] - 1)

    weights = torch.where(kept, scaled.exp(), 0.0)
    by_logit = x.argsort(dim=-1, descending=True, stable=True)
    ranked, levels = weights.gather(1, by_logit), x.gather(1, by_logit)
    mass = ranked.double().cumsum(dim=-1)
    larger = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1)
    nucleus = larger < top_p[:, None].double() * mass[:, -1:]
    nucleus[:, 0] = True
    last = nucleus.sum(dim=-1, keepdim=True) - 1
    floor = torch.where(top_p[:, None] >= 1, float("-inf"), levels.gather(1, last))
    return kept & (x >= floor)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """token = argmax over the kept set of logit / temperature + Gumbel noise; the lowest id on ties.

    Kept, in this order (ties with the last kept logit stay, so the set does not depend on token order):
        min_p   softmax(logit / temperature) ≥ min_p · its maximum
        top_k   the k largest
        top_p   the fewest of what is left, largest first, whose probability (of what is left) reaches top_p
    Noise of token t at position n of a request with seed s: word (t / 1024) mod 4 of
    Philox4x32-10(key = s, counter = (t / 4096 · 1024 + t mod 1024, n, 0, 0)). So a draw depends on nothing but
    (seed, position, logits): not on the batch, nor on what was drawn before.

    Sequence i's settings stand in row rows[i] of their tables.

    logits [B, V] (float32, bfloat16 or float16); rows, positions [B] int32; temperature, top_p, min_p [R] float32;
    top_k [R] int32; seeds [R] int64 → [B] int64. temperature < 1e-5 takes the argmax; top_k ≤ 0, top_p ≥ 1 and
    min_p ≤ 0 are off. A sequence with a NaN or +∞, or with nothing above −∞, gives −1.
    """
    temperature, top_k, top_p, min_p, seeds = (of[rows] for of in (temperature, top_k, top_p, min_p, seeds))
    x = logits.float()
    top = x.amax(dim=-1)
    tokens = x.argmax(dim=-1)
    drawn = ((temperature >= COLDEST) & torch.isfinite(top)).nonzero().squeeze(1)
    if drawn.numel():
        some, heat = x[drawn], temperature[drawn]
        filters = (top_k[drawn] > 0) | (top_p[drawn] < 1) | (min_p[drawn] > 0)
        scores = some / heat[:, None] + gumbel(seeds[drawn], positions[drawn], x.shape[1])
        cut = filters.nonzero().squeeze(1)
        if cut.numel():
            at = drawn[cut]
            kept = keep(some[cut], heat[cut], top_k[at], top_p[at], min_p[at])
            scores[cut] = scores[cut].masked_fill(~kept, float("-inf"))
        tokens[drawn] = scores.argmax(dim=-1)
    return torch.where(torch.isfinite(top), tokens, -1)
