"""What pools take is what their specs say, and layers see their own part of it."""

from __future__ import annotations

import pytest
import torch

from engine.cache.spec import CompressedKV, Group, LatentKV, LayerSpec, PagedKV, PoolSpec
from engine.cache.tensors import CacheTensors, LatentCache, PagedCache

CPU = torch.device("cpu")
SPECS: dict[str, LayerSpec] = {
    "keys and values": PagedKV(2, 8, 16, 2),
    "8 bits": PagedKV(2, 8, 16, 1),
    "8 bits in a window": PagedKV(1, 8, 8, 1, window=20),
    "latents": LatentKV(24, 8, 2),
    "latents of 8 bits": LatentKV(24, 8, 2, latent_bytes=1),
    "compressed": CompressedKV(8, 4, 2),
}


def tensors(spec: LayerSpec) -> CacheTensors:
    return CacheTensors(PoolSpec((Group(spec, (0, 2)),), (5,), 16), 3, torch.bfloat16, CPU)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_pool_takes_what_its_spec_says(spec: LayerSpec) -> None:
    made = tensors(spec)
    ((pool,),) = made.pools
    assert pool.nbytes == 5 * Group(spec, (0, 2)).block_bytes(16)
    assert made.spec.is_fp8 == ("8 bits" in next(name for name, other in SPECS.items() if other is spec))
    assert [len(caches) for caches in made.layers] == [1, 0, 1]


def test_layers_of_a_block_stand_apart() -> None:
    made = tensors(SPECS["8 bits"])
    (first,), _, (last,) = made.layers
    assert isinstance(first, PagedCache)
    assert isinstance(last, PagedCache)
    last.k.copy_(torch.ones_like(last.k, dtype=torch.float32))
    assert last.k.dtype == last.v.dtype == torch.float8_e4m3fn
    assert not any(cache.float().any() for cache in (first.k, first.v, last.v))


def test_latents_of_8_bits_have_rotated_keys_beside_them() -> None:
    made = tensors(SPECS["latents of 8 bits"])
    (first,), _, (last,) = made.layers
    assert isinstance(first, LatentCache)
    assert isinstance(last, LatentCache)
    assert first.keys is not None
    assert last.keys is not None
    assert (last.entries.dtype, last.keys.dtype) == (torch.float8_e4m3fn, torch.bfloat16)
    assert (last.entries.shape, last.keys.shape) == ((5, 16, 24), (5, 16, 8))
    last.keys.fill_(3.0)
    last.entries[4] = torch.full((16, 24), 2.0).to(torch.float8_e4m3fn)
    assert not first.entries.float().any()
    assert not first.keys.any()
    assert last.entries.float().sum() == 2 * 16 * 24
    assert last.keys.float().sum() == 3 * 5 * 16 * 8


@pytest.mark.parametrize("blocks", [1 << 28, (1 << 31) - 1])
def test_pools_that_no_memory_holds_are_a_sentence(blocks: int) -> None:
    wide = Group(PagedKV(64, 512, 512, 2), tuple(range(512)))
    with pytest.raises(ValueError, match=rf"does not hold a cache of {blocks} blocks .*: lower cache\.num_blocks"):
        CacheTensors(PoolSpec((wide,), (blocks,), 128), 512, torch.bfloat16, CPU)
