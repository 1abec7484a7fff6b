"""Latent attention over a cache whose tokens ranks share out (`engine.parallel.context`).

A rank has some heads, and some tokens of all that these read. Entries of few queries go to the tokens: each rank takes
the queries of all heads over the tokens that it has, and what ranks get is added up by its softmax sums. For entries of
many queries the tokens come to the heads: latents, which are small, are put together for as long as a layer takes.
"""

from __future__ import annotations

import torch

from engine.cache.spec import LatentKV
from engine.cache.tensors import LatentCache
from engine.layers.build_context import BuildContext
from engine.layers.mla import LatentAttention
from engine.models.config import LatentAttentionConfig
from engine.parallel.context import SharedContext
from engine.runner.batch import DeviceBatch, OwnTokens
from kernels.batch import AttentionBatch
from kernels.sizes import cdiv
from kernels.weight import Dense

# Queries an entry from which latents are put together, more than an entry with drafts has, and the most bytes that they
# may take.
GATHER_QUERIES = 32
GATHER_BYTES = 1 << 30
# Queries that go to the tokens at once: each is as wide as a latent for every head of all ranks.
MAX_QUERIES = 1024


class SharedLatentAttention(LatentAttention):
    """`LatentAttention` over a cache of which each rank keeps some tokens. Entries of few queries send these to the
    tokens; entries of many have the latents that they read gathered, while there is room."""

    def __init__(self, config: LatentAttentionConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        channels = config.kv_rank + config.rope_dim
        self._context = SharedContext(build.communicator, config.num_heads, channels, build.device)
        (spec,) = self.specs
        assert isinstance(spec, LatentKV)
        self._latent_bytes = spec.bytes_per_token

    def _attend(self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, cache: LatentCache) -> torch.Tensor:
        own, kv_up = batch.own, self.kv_up.value.dense(self.kv_up.dtype)
        assert own is not None
        gathers = self._gathers(batch)
        expands = gathers and self._expands(batch)
        num_sent = batch.num_single if gathers else len(q)  # queries that go to the tokens
        absorbed = self._write(q, kv, batch, cache, own.slots[cache.group], num_sent if expands else len(q))
        made = []
        if num_sent:
            o = self._over_own_tokens(absorbed[:num_sent], batch, own, cache)
            values = self._ops.group_linear(o.flatten(1), Dense(kv_up[:, self.config.nope_dim :]))
            made.append(values.unflatten(1, (q.shape[1], -1)))
        if gathers:
            entries, keys, table = self._gathered(batch, own, cache)
            longer = AttentionBatch(
                batch.query_start[num_sent:] - num_sent,
                batch.context_len[num_sent:],
                0,
                batch.max_query,
                batch.max_context,
                batch.max_total_context,
            )
            made.append(
                self._ops.latent_attention(
                    q[num_sent:],
                    absorbed[num_sent:],
                    kv_up,
                    entries,
                    table,
                    longer,
                    self.config.scale,
                    max_total_context=batch.max_total_context if expands else 0,
                    keys=keys,
                    latent_scale=self._scale,
                )
            )
        return made[0] if len(made) == 1 else torch.cat(made)

    def _gathers(self, batch: DeviceBatch) -> bool:
        """Whether entries past num_single have their tokens brought here, for which there must be room."""
        entries, queries = len(batch.context_len) - batch.num_single, len(batch.token_ids) - batch.num_single
        held = batch.max_total_context * self._latent_bytes
        return 0 < held <= GATHER_BYTES and queries >= GATHER_QUERIES * entries > 0

    def _over_own_tokens(
        self, absorbed: torch.Tensor, batch: DeviceBatch, own: OwnTokens, cache: LatentCache
    ) -> torch.Tensor:
        """absorbed [F, H, L + P] of the first F tokens → [F, H, L] over the tokens of all ranks. Each goes as an entry
        of its own."""
        table, few, made = batch.block_tables[cache.group], len(absorbed), []
        for first in range(0, few, MAX_QUERIES):
            some = slice(first, min(first + MAX_QUERIES, few))
            o, lse = self._ops.latent_partials(
                self._context.all_heads(absorbed[some]),
                cache.entries,
                table[some] if few <= batch.num_single else table.index_select(0, batch.entries[some]),
                own.context_len[some],
                self.config.scale,
                self.config.kv_rank,
                cdiv(batch.max_context, own.ranks * own.block_share) * own.block_share,
                keys=cache.keys,
                latent_scale=self._scale,
            )
            made.append(self._context.own_heads(o, lse, absorbed.dtype))
        return made[0] if len(made) == 1 else torch.cat(made)

    def _gathered(
        self, batch: DeviceBatch, own: OwnTokens, cache: LatentCache
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The tokens of all entries past num_single as `LatentCache` has them, each rank's run of a block a block of
        its own, and the entries' table of these."""
        size, lengths = own.ranks * own.block_share, batch.context_len[batch.num_single :]
        table = batch.block_tables[cache.group][batch.num_single :]
        counts = (lengths + size - 1) // size
        stops = counts.cumsum(0)
        # So many at most, which the host knows.
        total = batch.max_total_context // size + len(lengths)
        place = torch.arange(total, device=lengths.device)
        entry = torch.searchsorted(stops, place, right=True).clamp(max=len(lengths) - 1)
        within = (place - (stops - counts)[entry]).clamp(0, table.shape[1] - 1)
        blocks = table[entry, within].long()
        most = cdiv(min(batch.max_context, batch.max_total_context), size)
        columns = torch.arange(most * own.ranks, device=lengths.device)
        places = ((stops - counts)[:, None] * own.ranks + columns).clamp(max=total * own.ranks - 1).int()
        keys = None if cache.keys is None else self._context.whole_blocks(cache.keys[blocks])
        return self._context.whole_blocks(_taken(cache.entries, blocks)), keys, places


def _taken(entries: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Blocks of a cache, as bytes where torch gathers no 8-bit floats."""
    if entries.dtype.itemsize > 1:
        return entries[blocks]
    return entries.view(torch.uint8)[blocks].view(entries.dtype)


def latent_attention(config: LatentAttentionConfig, build: BuildContext) -> LatentAttention:
    """The layer of a model that is built so."""
    return (SharedLatentAttention if build.sliced_context else LatentAttention)(config, build)
