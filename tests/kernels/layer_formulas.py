"""Ops of recurrent layers, of several residual streams and of chosen experts, from their formulas in float64."""

from __future__ import annotations

import math

import torch

from kernels.batch import AttentionBatch
from kernels.routing import Routing
from kernels.weight import Weight


def _rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / math.sqrt(float((x * x).sum()) / len(x) + eps)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def norm_add(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor, offset: float = 0.0
) -> torch.Tensor:
    rows = [
        _rms(row.double(), eps) * (weight.double() + offset) + before.double()
        for row, before in zip(x, residual, strict=True)
    ]
    return torch.stack(rows) if rows else x


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x.double() * _sigmoid(gate.double())


def rotate_tail(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    y, half = x.double().clone(), cos_sin.shape[1] // 2
    plain = x.shape[2] - 2 * half
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            cos, sin = float(cos_sin[position, i]), float(cos_sin[position, half + i])
            a, b = x[token, :, plain + 2 * i].double(), x[token, :, plain + 2 * i + 1].double()
            y[token, :, plain + 2 * i], y[token, :, plain + 2 * i + 1] = a * cos - b * sin, a * sin + b * cos
    return y


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    tokens, heads, size = x.shape
    y, gates = torch.empty(tokens, heads * size, dtype=torch.float64), gate.double()
    for token in range(tokens):
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            normed = _rms(x[token, head].double(), eps) * weight.double()
            y[token, own] = normed * gates[token, own] * _sigmoid(gates[token, own])
    return y


def group_linear(x: torch.Tensor, weight: Weight, deterministic: bool = False) -> torch.Tensor:
    groups, outputs, size = weight.shape
    numbers = weight.dense(x.dtype)
    y = torch.empty(len(x), groups * outputs, dtype=torch.float64)
    for group in range(groups):
        own = x[:, group * size : (group + 1) * size].double()
        y[:, group * outputs : (group + 1) * outputs] = own @ numbers[group].double().T
    return y


def hyper_merge(x: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    y, count = torch.empty(streams.shape, dtype=torch.float64), streams.shape[1]
    for token in range(len(x)):
        for n in range(count):
            y[token, n] = post[token, n].double() * x[token].double()
            for j in range(count):
                y[token, n] += comb[token, j, n].double() * streams[token, j].double()
    return y


def hyper_mix(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    norm_eps: float,
    iterations: int,
    eps: float,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, n, width = streams.shape
    inputs = torch.empty(tokens, width, dtype=torch.float64)
    posts, combs = torch.empty(tokens, n, dtype=torch.float64), torch.empty(tokens, n, n, dtype=torch.float64)
    of_base, of_scale = base.double(), scale.double()
    for token in range(tokens):
        m = fn.double() @ _rms(streams[token].flatten().double(), norm_eps)
        pre = _sigmoid(m[:n] * of_scale[0] + of_base[:n]) + eps
        posts[token] = 2 * _sigmoid(m[n : 2 * n] * of_scale[1] + of_base[n : 2 * n])
        comb = (m[2 * n :] * of_scale[2] + of_base[2 * n :]).view(n, n).exp()
        comb = comb / comb.sum(1, keepdim=True) + eps
        comb = comb / (comb.sum(0, keepdim=True) + eps)
        for _ in range(iterations - 1):
            comb = comb / (comb.sum(1, keepdim=True) + eps)
            comb = comb / (comb.sum(0, keepdim=True) + eps)
        combs[token] = comb
        inputs[token] = sum(pre[i] * streams[token, i].double() for i in range(n))
    return inputs, posts, combs


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    deterministic: bool = False,
) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=torch.float64)
    width, places = weight.shape[1], state.shape[1]
    for seq, slot in enumerate(state_slots.tolist()):
        lo, hi = int(batch.query_start[seq]), int(batch.query_start[seq + 1])
        first = int(batch.context_len[seq]) - (hi - lo)
        held = {p: state[slot, p % places].double().clone() for p in range(max(0, first - width + 1), first)}
        for token in range(lo, hi):
            position = first + token - lo
            held[position] = x[token].double()
            total = torch.zeros(x.shape[1], dtype=torch.float64)
            for j in range(width):
                if position - width + 1 + j >= 0:
                    total += weight[:, j].double() * held[position - width + 1 + j]
            y[token] = total * _sigmoid(total)
        for token in range(lo, hi):
            state[slot, (first + token - lo) % places] = x[token].to(state.dtype)
    return y


def gated_delta(
    qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    state_slots: torch.Tensor,
    batch: AttentionBatch,
    num_key_heads: int,
    deterministic: bool = False,
    states_only: bool = False,
) -> torch.Tensor | None:
    _, heads, dk, dv = state.shape
    out = torch.empty(len(qkv), heads, dv, dtype=torch.float64)
    for seq, slot in enumerate(state_slots.tolist()):
        lo, hi = int(batch.query_start[seq]), int(batch.query_start[seq + 1])
        if lo == hi:
            continue
        begins = int(batch.context_len[seq]) == hi - lo
        s = torch.zeros(heads, dk, dv, dtype=torch.float64) if begins else state[slot].double()
        stop = hi if batch.num_kept is None else lo + int(batch.num_kept[seq])
        for token in range(lo, hi):
            for head in range(heads):
                key_head = head * num_key_heads // heads
                q = qkv[token, key_head * dk : (key_head + 1) * dk].double()
                at = (num_key_heads + key_head) * dk
                k = qkv[token, at : at + dk].double()
                at = 2 * num_key_heads * dk + head * dv
                v = qkv[token, at : at + dv].double()
                q, k = q / math.sqrt(float(q @ q) + 1e-6), k / math.sqrt(float(k @ k) + 1e-6)
                rate = math.log1p(math.exp(float(a[token, head]) + float(dt_bias[head])))
                own = math.exp(-math.exp(float(a_log[head])) * rate) * s[head]
                beta = 1 / (1 + math.exp(-float(b[token, head])))
                s[head] = own + torch.outer(k, beta * (v - k @ own))
                out[token, head] = q @ s[head] / math.sqrt(dk)
            if token + 1 == stop:
                state[slot] = s.to(state.dtype)
    return None if states_only else out


def moe_route(
    x: torch.Tensor,
    router: torch.Tensor,
    routing: Routing,
    token_ids: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    deterministic: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    normed, weights, chosen = [], [], []
    for token, row in enumerate(x):
        h = row
        if norm_weight is not None:
            h = (_rms(row.double(), eps) * (norm_weight.double() + offset)).to(x.dtype)
        logits = router.double() @ h.double()
        bias = torch.zeros_like(logits) if routing.bias is None else routing.bias.double()
        logits = logits + bias if routing.bias_of == "logits" else logits
        scores = _scores(logits, routing)
        if routing.table is not None:
            assert token_ids is not None
            experts = routing.table[int(token_ids[token])].tolist()
        else:
            experts = _best(scores if routing.bias_of == "logits" else scores + bias, routing)
        own = [float(scores[expert]) for expert in experts]
        total = sum(own) + 1e-20 if routing.renormalize else 1.0
        shared = range(len(router), len(router) + routing.num_shared)
        normed.append(h)
        weights.append([weight / total * routing.scale for weight in own] + [1.0] * routing.num_shared)
        chosen.append([expert - routing.first for expert in (*experts, *shared)])
    count = routing.top_k + routing.num_shared
    return (
        torch.stack(normed) if normed else x,
        torch.tensor(weights, dtype=torch.float64).view(-1, count),
        torch.tensor(chosen, dtype=torch.int32).view(-1, count),
    )


def _scores(logits: torch.Tensor, routing: Routing) -> torch.Tensor:
    if routing.score == "softmax":
        powers = (logits - logits.max()).exp()
        return powers / powers.sum()
    return _sigmoid(logits) if routing.score == "sigmoid" else torch.log1p(logits.exp()).sqrt()


def _best(rank: torch.Tensor, routing: Routing) -> list[int]:
    """The experts of the highest ranks, of the best groups; of equal ranks the lower number, a NaN last."""
    values = [-math.inf if math.isnan(value) else value for value in rank.tolist()]
    size = len(values) // max(routing.num_groups, 1)
    allowed = range(len(values))
    if routing.num_groups > 1:
        groups = [sorted(values[i : i + size], reverse=True) for i in range(0, len(values), size)]
        worth = [group[0] if routing.group_score == "max" else sum(group[:2]) for group in groups]
        best = sorted(range(len(worth)), key=lambda i: (-worth[i], i))[: routing.top_groups]
        allowed = [i for i in allowed if i // size in best]
    return sorted(allowed, key=lambda i: (-values[i], i))[: routing.top_k]
