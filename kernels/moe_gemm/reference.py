"""Feed-forward parts of the chosen experts (Shazeer et al. 2017, arXiv:1701.06538)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.routing import ExpertBiases
from kernels.weight import Weight


def moe_gemm(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    weights: torch.Tensor,
    experts: torch.Tensor,
    residual: torch.Tensor | None = None,
    activation: str = "silu",
    limit: float | None = None,
    num_shared: int = 0,
    deterministic: bool = False,
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """y[t] = residual[t] + Σₖ w[t,k] · down[e] · (act(g) ∘ u),  (g, u) = gate_up[e] · x[t],  e = experts[t,k], each
    product with its bias where there are biases.

    With a limit, g is clipped above and u on both sides before the activation: "silu", "gelu_tanh", or "swiglu_oai",
    which is (g · σ(1.702 g)) ∘ (u + 1) (gpt-oss, arXiv:2508.10925).

    x [T, M]; gate_up [E, 2F, M] (gate, then up) and down [E, M, F] of any kind; weights [T, K] float32; experts [T, K]
    int32, an expert outside of [0, E) adds nothing; residual [T, M] → [T, M] in x's dtype. Products accumulate in
    float32; act(g) ∘ u is rounded to x's dtype, the sum over k and the residual is taken in float32 and rounded once;
    for more than a few tokens its summands may be rounded too.
    num_shared: that each token's last so many experts are the table's last, in order; may be used to read them early.
    deterministic: a token's result has the same bits whatever stands beside it.
    """
    if deterministic and len(x) > 1:
        parts = [None] * len(x) if residual is None else residual.split(1)
        rows = zip(x.split(1), weights.split(1), experts.split(1), parts, strict=True)
        more = (activation, limit, num_shared, False, biases)
        return torch.cat([moe_gemm(a, gate_up, down, w, e, part, *more) for a, w, e, part in rows])
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if residual is None else residual.float()
    flat = experts.flatten().long()
    order = torch.argsort(flat, stable=True)
    hit, counts = torch.unique_consecutive(flat[order], return_counts=True)
    lo = 0
    for expert, count in zip(hit.tolist(), counts.tolist(), strict=True):
        pairs = order[lo : lo + count]
        lo += count
        if not 0 <= expert < gate_up.shape[0]:
            continue
        tokens = pairs // experts.shape[1]
        first, second = (None, None) if biases is None else (biases.gate_up[expert], biases.down[expert])
        g, u = gate_up.matrix(expert).product(x[tokens], first).float().chunk(2, dim=-1)
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        if activation == "swiglu_oai":
            act, u = g * torch.sigmoid(1.702 * g), u + 1
        else:
            act = F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh")
        y = down.matrix(expert).product((act * u).to(x.dtype), second).float()
        out = out.index_add(0, tokens, y * weights.flatten()[pairs, None])
    return out.to(x.dtype)
