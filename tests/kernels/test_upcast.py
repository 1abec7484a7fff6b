"""8-bit caches that are written out for prompts hold what attention reads, and only where Hopper's kernel takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.cache_scales import CacheScales
from kernels.paged_attention.cases import case
from kernels.paged_attention.reference import paged_attention
from kernels.testing import EXACT, assert_close, poisoned, seeded, workspace

SEQS = [(1, 40), (1, 0), (3, 3), (40, 100), (5, 0), (9, 33)]


@pytest.mark.parametrize("block_size", [16, 32])
def test_attention_over_what_is_written_out_is_attention_over_the_cache(block_size: int, device: torch.device) -> None:
    from kernels.paged_attention.upcast import upcast

    made = case("", torch.float32, SEQS, 6, 2, 80, block_size=block_size, strided=True, dirty=True, scales=(0.1, 0.3))
    given = made.make(device, seeded(device))
    batch = given["batch"]
    assert batch.max_total_context == 136
    read = (given["k_cache"], given["v_cache"], given["block_table"], batch.context_len)
    with poisoned():
        wide = upcast(workspace(), *read, torch.float32, batch.num_single, batch.max_total_context)
    assert len(wide.k) == -(-136 // block_size) + 4
    want = paged_attention(**given)
    # sequences of one query keep to the cache: theirs are no rows of the table
    first = batch.num_single
    rest = replace(batch, query_start=batch.query_start[first:], context_len=batch.context_len[first:], num_single=0)
    taken = {**given, "k_cache": wide.k, "v_cache": wide.v, "block_table": wide.table[first:], "batch": rest}
    assert_close("wide", paged_attention(**taken)[first:], want[first:], EXACT)
    assert isinstance(given["scales"], CacheScales)


def test_who_writes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.paged_attention import upcast

    made = case("", torch.bfloat16, [(300, 300)], 8, 2, 128, scales=(1.0, 1.0))
    cpu = torch.device("cpu")
    given = made.make(cpu, seeded(cpu))
    read = (given["q"], given["k_cache"], given["v_cache"])
    assert not upcast.upcasts(*read, 300), "no Hopper"
    monkeypatch.setattr(upcast, "group_products", lambda device: True)
    assert upcast.upcasts(*read, 300)
    assert upcast.upcasts(*read, 1 << 20)
    assert not upcast.upcasts(*read, 0), "nobody knows how many there are"
    assert not upcast.upcasts(*read, (1 << 20) + 1), "more than a gibibyte"
    assert not upcast.upcasts(given["q"], *(cache.bfloat16() for cache in read[1:]), 300), "read as it is"
    assert not upcast.upcasts(given["q"].float(), *read[1:], 300)
