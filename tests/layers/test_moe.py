"""Shared experts in one table with the others, or a part of their own: the layer computes the same."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.layers.build_context import BuildContext
from engine.layers.moe import Moe
from engine.layers.norm import RmsNorm
from engine.models.config import ModelConfig, MoeConfig, NormConfig
from kernels.select import select
from kernels.workspace import Workspace

CPU = torch.device("cpu")
CONFIG = ModelConfig("test", 8, 12, (), NormConfig(eps=1e-5), 64, tied=False)
EXPERTS = MoeConfig(num_experts=4, top_k=2, intermediate=8, num_shared=2, activation="silu", limit=0.5)


def test_shared_experts_apart_give_what_those_in_the_table_do() -> None:
    torch.manual_seed(1)
    build = BuildContext(select(Workspace(CPU)), CONFIG, torch.float32, CPU, 64)
    together, apart, norm = Moe(EXPERTS, build), Moe(replace(EXPERTS, apart=True), build), RmsNorm(12, build)
    for layer in (together, apart, norm):
        layer.to_empty(device=CPU)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
    assert apart.shared is not None
    with torch.no_grad():
        gate_up, down = together.gate_up.value.dense(torch.float32), together.down.value.dense(torch.float32)
        gate, up = gate_up[4:].chunk(2, dim=1)
        apart.router.copy_(together.router)
        for held, numbers in (
            (apart.gate_up, gate_up[:4]),
            (apart.down, down[:4]),
            (apart.shared.gate_up.weight, torch.cat([gate.flatten(0, 1), up.flatten(0, 1)])),
            (apart.shared.down.weight, down[4:].transpose(0, 1).flatten(1)),
        ):
            next(held.parameters()).copy_(numbers)
    x, ids = torch.randn(5, 12), torch.arange(5)
    for residual in (None, x):
        wanted = together(x.clone(), norm, ids, residual=residual)
        given = x.clone()
        got = apart(given, norm, ids, residual=None if residual is None else given)
        torch.testing.assert_close(got, wanted)
