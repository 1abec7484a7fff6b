"""Each op once more, straight from its formula in float64, a token or a row at a time: checks the references."""

from __future__ import annotations

import math

import torch

from kernels.batch import AttentionBatch
from kernels.cache_scales import UNSCALED, CacheScales
from kernels.rope import Rope
from kernels.weight import Fp4, Fp8, Int8, PackedInt, Parts, Weight
from kernels.weight.inputs import Inputs
from tests.kernels.layer_formulas import causal_conv as causal_conv
from tests.kernels.layer_formulas import gated_delta as gated_delta
from tests.kernels.layer_formulas import gated_norm as gated_norm
from tests.kernels.layer_formulas import group_linear as group_linear
from tests.kernels.layer_formulas import hyper_merge as hyper_merge
from tests.kernels.layer_formulas import hyper_mix as hyper_mix
from tests.kernels.layer_formulas import moe_route as moe_route
from tests.kernels.layer_formulas import norm_add as norm_add
from tests.kernels.layer_formulas import rotate_tail as rotate_tail
from tests.kernels.layer_formulas import sigmoid_gate as sigmoid_gate


def repack(
    words: torch.Tensor, layout: str, bits: int, outputs: int, places: torch.Tensor | None = None
) -> torch.Tensor:
    per, masks = 32 // bits, (1 << bits) - 1
    held = words.tolist()
    count = {"awq": len(held), "gptq": len(held) * per, "pack-quantized": len(held[0]) * per}[layout]
    order = range(count) if places is None else places.tolist()
    made = torch.zeros(outputs, -(-len(order) // per), dtype=torch.int64)
    for n in range(outputs):
        for at, k in enumerate(order):
            if layout == "awq":
                word, place = held[k][n // per], (0, 4, 1, 5, 2, 6, 3, 7)[n % per]
            else:
                word, place = held[k // per][n] if layout == "gptq" else held[n][k // per], k % per
            made[n, at // per] |= (word >> bits * place & masks) << bits * (at % per)
    return made


def round_rows(rows: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Of scales in the precision that they are held in, numbers by exact quotients."""
    group, span = (32, 7.5) if kind == "int4" else (rows.shape[1], {"fp8": 448.0, "int8": 127.5}[kind])
    numbers, scales = [], []
    for row in rows.float():
        parts = row.split(group)
        largest = torch.stack([part.abs().max() for part in parts])
        held = (largest / torch.tensor(span)).clamp(min=1e-10).to(torch.bfloat16 if kind == "int4" else torch.float32)
        scales.append(held)
        ratios = torch.cat([part / scale.float() for part, scale in zip(parts, held, strict=True)])
        if kind == "fp8":
            numbers.append(ratios.clamp(-448, 448).to(torch.float8_e4m3fn))
            continue
        low, high = (-8, 7) if kind == "int4" else (-128, 127)
        whole = [min(max(round(ratio), low), high) for ratio in ratios.tolist()]
        if kind == "int4":
            words = [whole[at : at + 8] for at in range(0, len(whole), 8)]
            whole = [sum((number + 8) << 4 * place for place, number in enumerate(word)) for word in words]
            whole = [word - (1 << 32) if word >> 31 else word for word in whole]
        numbers.append(torch.tensor(whole, dtype=torch.int32 if kind == "int4" else torch.int8))
    return torch.stack(numbers), torch.stack(scales)


def token_inputs(
    tokens: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    seqs: torch.Tensor,
    positions: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, slots = [], []
    for seq, position in zip(seqs.tolist(), positions.tolist(), strict=True):
        row = int(rows[seq])
        ids.append(int(tokens[row, position]))
        slots.append(int(blocks[row, position // block_size]) * block_size + position % block_size)
    return torch.tensor(ids), torch.tensor(slots), torch.stack([blocks[row] for row in rows.tolist()])


def shift_entries(
    lengths: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
    out_rows: torch.Tensor,
    query_start: torch.Tensor,
    counts: torch.Tensor | None,
    row_lengths: torch.Tensor,
    dummy: int,
) -> None:
    for entry, row in enumerate(rows.tolist()):
        if int(out_rows[entry]) == dummy:
            continue
        drafts = 0 if counts is None else int(counts[entry])
        ahead = int(lengths[entry]) - drafts - int(row_lengths[row])
        lengths[entry] -= ahead
        for token in range(int(query_start[entry]), int(query_start[entry + 1])):
            positions[token] -= ahead


def put_drafts(
    proposed: torch.Tensor,
    starts: torch.Tensor,
    sizes: torch.Tensor,
    counts: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    for entry, row in enumerate(rows.tolist()):
        for place in range(int(lengths[entry]) - int(counts[entry]), int(lengths[entry])):
            own = min(max(place - int(starts[entry]), 0), int(sizes[entry]) - 1)
            tokens[row, place] = proposed[entry, max(own, 0)]


def draft_places(
    lengths: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, depth: int, dummy: int
) -> torch.Tensor:
    places = torch.empty(4, depth, len(rows), dtype=torch.int32)
    for entry, row in enumerate(rows.tolist()):
        held = int(lengths[entry]) - int(counts[entry])  # before the first draft
        for i in range(depth):
            wanted = i < int(counts[entry])
            newest = held - 1 + i
            places[:, i, entry] = torch.tensor((row, newest - 1, newest, newest + 1) if wanted else (dummy, 0, 1, 1))
    return places


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
    told = torch.empty(2, len(counts), dtype=torch.int32)
    for entry, count in enumerate(counts.tolist()):
        place = int(last[entry]) - count
        given = 1
        while given <= count and int(ids[place + 1]) == int(drawn[place]):
            place, given = place + 1, given + 1
        if given > 1 and int(drawn[place]) < 0:
            place, given = place - 1, given - 1
        told[:, entry] = torch.tensor((given, place))
        row_lengths[int(out_rows[entry])] = int(lengths[entry]) - count + given
    return told


def keep_tokens(drawn: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    for token, row, length in zip(drawn.tolist(), rows.tolist(), lengths.tolist(), strict=True):
        tokens[row, length] = max(token, 0)
    return drawn


def mask_logits(logits: torch.Tensor, seqs: torch.Tensor, masks: torch.Tensor, first: int = 0) -> None:
    for seq, words in zip(seqs.tolist(), masks.tolist(), strict=True):
        for token in range(first, first + logits.shape[1]):
            if not words[token // 32] >> token % 32 & 1:
                logits[seq, token - first] = -torch.inf


def embedding(ids: torch.Tensor, weight: Weight, dtype: torch.dtype, scale: float) -> torch.Tensor:
    numbers = weight.dense(torch.float64)
    rounded = float(torch.tensor(scale).to(dtype))
    made = torch.empty(len(ids), weight.shape[1], dtype=torch.float64)
    for token, i in enumerate(ids.tolist()):
        made[token] = numbers[i] * rounded
    return made


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    offset: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    h = x if residual is None else (x.double() + residual.double()).to(x.dtype)
    f = h.double()
    root = torch.sqrt((f * f).sum(dim=1, keepdim=True) / f.shape[1] + eps)
    return f / root * (weight.double() + offset), h


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    f = x.double()
    if norm_weight is not None:
        f = f / torch.sqrt((f * f).mean(dim=1, keepdim=True) + eps) * (norm_weight.double() + offset)
    if isinstance(weight, Fp8 | Int8) and weight.inputs.number is not None:
        f = quantized(f.to(x.dtype).double(), weight.inputs)
    if isinstance(weight, PackedInt) and weight.rounding.number is not None:
        f = quantized(f.to(x.dtype).double(), weight.rounding)
    if isinstance(weight, Fp4) and weight.rounding.number is not None:
        f = round_fp4(f.to(x.dtype), weight.rounding)
    if isinstance(weight, Parts):
        y = torch.cat([linear(f.to(x.dtype), part) for part in weight.parts], dim=1)
    else:
        y = torch.einsum("tk,nk->tn", f, weight.dense(torch.float64))
    if bias is not None:
        y = y + bias.double()
    if activation is not None:
        y = gated_activation(y, activation)
    return y if residual is None else y + residual.double()


def quantized(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Each group over its scale, rounded to four significant bits, the smallest step being 2^-9 (e4m3), or to whole
    numbers."""
    if inputs.number == "int8":
        scale = x.abs().amax(dim=1, keepdim=True) / 127.5 if inputs.scale is None else inputs.scale.double()
        return torch.round(x / scale).clamp(-128, 127) * scale
    made = torch.empty_like(x)
    for first in range(0, x.shape[1], inputs.group or x.shape[1]):
        part = x[:, first : first + (inputs.group or x.shape[1])]
        scale = part.abs().amax(dim=1, keepdim=True).clamp(1e-10, inputs.largest) / 448
        if inputs.power_of_two:
            scale = 2 ** torch.ceil(torch.log2(scale))
        if inputs.scale is not None:
            scale = inputs.scale.double()
        made[:, first : first + part.shape[1]] = nearest_fp8(part / scale) * scale
    return made


def round_fp4(
    x: torch.Tensor,
    inputs: Inputs,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
) -> torch.Tensor:
    """Each group over its scale, rounded to two significant bits, the smallest step being 1/2 (e2m1)."""
    f = x.double()
    if norm_weight is not None:
        f = f / torch.sqrt((f * f).mean(dim=1, keepdim=True) + eps) * (norm_weight.double() + offset)
    parts = f.to(x.dtype).double().unflatten(1, (-1, inputs.group))
    largest = parts.abs().amax(dim=2, keepdim=True)
    if inputs.scale is not None:
        scale = nearest_fp8(largest / 6 / inputs.scale.double()) * inputs.scale.double()
    else:
        power = torch.floor(torch.log2(largest))
        scale = torch.where(largest > 0, 2 ** (power + (largest >= 1.75 * 2**power) - 2), 0.0)
    ratio = torch.where(scale > 0, parts / scale, 0.0).clamp(-6, 6)
    step = 2 ** (torch.floor(torch.log2(ratio.abs().clamp(min=1))) - 1)
    return (torch.round(ratio / step) * step * scale).flatten(1)


def nearest_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as the nearest 8-bit float (e4m3), or as the largest there is."""
    ratio = x.clamp(-448, 448)
    step = 2 ** (torch.floor(torch.log2(ratio.abs().clamp(min=2**-6))) - 3)
    return torch.round(ratio / step) * step


def gated_activation(x: torch.Tensor, activation: str, limit: float | None = None) -> torch.Tensor:
    half = x.shape[1] // 2
    gate, up = x[:, :half].double(), x[:, half:].double()
    if limit is not None:
        gate, up = gate.clip(max=limit), up.clip(-limit, limit)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def rope_kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    deterministic: bool = False,
    scales: CacheScales = UNSCALED,
) -> torch.Tensor:
    _, g, block_size, d = k_cache.shape
    half = rope.cos_sin.shape[1] // 2
    out = torch.empty(qkv.shape[0], num_heads, d, dtype=torch.float64)

    def turn(head: torch.Tensor, weight: torch.Tensor | None, position: int) -> torch.Tensor:
        f = head.double().clone()
        if weight is not None:
            f = f / math.sqrt(float((f * f).mean()) + rope.eps) * (weight.double() + rope.offset)
        turned = f.clone()
        for pair in range(half):
            i, j = (2 * pair, 2 * pair + 1) if rope.interleaved else (pair, pair + half)
            rotation = complex(float(rope.cos_sin[position, pair]), float(rope.cos_sin[position, pair + half]))
            point = complex(float(f[i]), float(f[j])) * rotation
            turned[i], turned[j] = point.real, point.imag
        return turned

    for token in range(qkv.shape[0]):
        heads = qkv[token].view(-1, d)
        position, slot = int(positions[token]), int(slots[token])
        for i in range(num_heads):
            out[token, i] = turn(heads[i], rope.q_norm, position)
        if slot < 0:
            continue
        for i in range(g):
            key = turn(heads[num_heads + i], rope.k_norm, position).to(qkv.dtype)
            place = (slot // block_size, i, slot % block_size)
            k_cache[place] = _held(key, scales.k, k_cache.dtype)
            v_cache[place] = _held(heads[num_heads + g + i], scales.v, v_cache.dtype)
    return out


def _held(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """x, over its scale to the nearest 8-bit float where a cache holds those."""
    return x.double() if dtype != torch.float8_e4m3fn else nearest_fp8(x.double() / scale).to(dtype)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    scales: CacheScales = UNSCALED,
) -> torch.Tensor:
    _, g, block_size, _ = k_cache.shape
    t, h, _ = q.shape
    out = torch.zeros(t, h, v_cache.shape[-1], dtype=torch.float64)
    for seq, length in enumerate(batch.context_len.tolist()):
        first, stop = int(batch.query_start[seq]), int(batch.query_start[seq + 1])
        if not length:
            continue
        places = [(int(block_table[seq, j // block_size]), j % block_size) for j in range(length)]
        keys = torch.stack([k_cache[block, :, place] for block, place in places]).double() * scales.k
        values = torch.stack([v_cache[block, :, place] for block, place in places]).double() * scales.v
        for token in range(first, stop):
            position = length - stop + token
            low = 0 if window is None else max(0, position - window + 1)
            for head in range(h):
                s = keys[low : position + 1, head * g // h] @ q[token, head].double() * scale
                if softcap is not None:
                    s = softcap * torch.tanh(s / softcap)
                weight = torch.exp(s)
                total = weight.sum() + (0 if sinks is None else math.exp(float(sinks[head])))
                out[token, head] = weight / total @ values[low : position + 1, head * g // h]
    return out


def rope_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rope: Rope,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    softcap: float | None,
    fused: bool,
    scales: CacheScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    num_heads = qkv.shape[1] // k_cache.shape[-1] - 2 * k_cache.shape[1]
    q = rope_kv_write(qkv, positions, slots, rope, k_cache, v_cache, num_heads, scales=scales).to(qkv.dtype)
    return paged_attention(q, k_cache, v_cache, block_table, batch, scale, window, softcap, sinks, scales)


def penalties(
    logits: torch.Tensor,
    token_table: torch.Tensor,
    rows: torch.Tensor,
    num_prompt: torch.Tensor,
    lengths: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    first: int = 0,
) -> None:
    vocab = logits.shape[1]
    for i, row in enumerate(rows.tolist()):
        tokens = [token - first for token in token_table[row, : int(lengths[i])].tolist()]
        output = [token for token in tokens[int(num_prompt[row]) :] if 0 <= token < vocab]
        counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab).tolist()
        x = logits[i].double()
        for token in {token for token in tokens if 0 <= token < vocab}:
            x[token] = x[token] / repetition[row].double() if x[token] > 0 else x[token] * repetition[row].double()
            if counts[token]:
                x[token] -= frequency[row].double() * counts[token] + presence[row].double()
        logits[i] = x.to(logits.dtype)


_MASK = 0xFFFFFFFF


def _philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 in plain integers (Salmon et al. 2011, Random123)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _MASK, (a >> 32) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def noise(seed: int, position: int, token: int) -> float:
    """Gumbel noise of one token."""
    counter = (token // 4096 * 1024 + token % 1024, position & _MASK, 0, 0)
    word = _philox((seed & _MASK, (seed >> 32) & _MASK), counter)[token // 1024 % 4]
    u = min(max(word * 2.0**-32, 2.0**-33), 1 - 2.0**-24)
    return -math.log(-math.log1p(-u))


def kept(x: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Tokens that survive the filters, by going down the sorted list."""
    top = max(x)
    order = sorted(range(len(x)), key=lambda token: -x[token])
    weight = [math.exp((value - top) / temperature) for value in x]
    order = [token for token in order if weight[token] >= min_p * (1 - 1e-7)]
    if 0 < top_k < len(order):
        order = [token for token in order if x[token] >= x[order[top_k - 1]]]
    if top_p >= 1:
        return order
    total = sum(weight[token] for token in order)
    reached, floor = 0.0, top
    for token in order:
        if reached >= top_p * total:
            break
        reached, floor = reached + weight[token], x[token]
    return [token for token in order if x[token] >= floor]


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
    drawn = []
    for i, x in enumerate(logits.double().tolist()):
        row = int(rows[i])
        heat = float(temperature[row])
        if heat < 1e-5:
            drawn.append(x.index(max(x)))
            continue
        tokens = kept(x, heat, int(top_k[row]), float(top_p[row]), float(min_p[row]))
        seed, position = int(seeds[row]), int(positions[i])
        drawn.append(max(tokens, key=lambda token: x[token] / heat + noise(seed, position, token)))
    return torch.tensor(drawn)


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, values, ranks = [], [], []
    for row, token in zip(logits.double().tolist(), tokens.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda t: (-row[t], t))
        total = math.log(sum(math.exp(value) for value in row))
        chosen = [token, *order[:k]]
        ids.append(chosen)
        values.append([row[t] - total for t in chosen])
        ranks.append([order.index(token) + 1, *range(1, k + 1)])
    return torch.tensor(ids), torch.tensor(values, dtype=torch.float64), torch.tensor(ranks)
