"""`weights.quantize`: numbers are the nearest that their kind has, wherever a source's rows and columns go."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import EngineConfig, WeightsConfig
from engine.models.gpt_oss import Transposed
from engine.models.reader import ConfigError
from engine.quant.formats.rounded import Kind
from engine.quant.plan import plan, shared_apart
from engine.quant.weight import Weight
from engine.runner.build import build_runner
from engine.weights import loader, runs, staging
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Rule, SharedBehind, SharedBehindConcat, concat
from kernels.registry import Op
from kernels.testing import bound
from kernels.weight import Dense, Fp8, Int8, PackedInt
from tests.gate.integers import rounded_to
from tests.kernels import interpreter

KINDS: dict[Kind, type] = {"fp8": Fp8, "int8": Int8, "int4": PackedInt}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def loaded(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    rule: Rule,
    shape: tuple[int, ...],
    kind: Kind,
    dense: bool = False,
    progress: staging.Progress | None = None,
    ops: Any = None,
    device: str = "cpu",
) -> Weight:
    save_file(tensors, folder / "model.safetensors")
    weight, checkpoint = Weight(shape, torch.bfloat16, "dense" if dense else "any"), Checkpoint.open(folder)
    rules = plan({rule.target: weight}, [rule], checkpoint, None, quantize=kind)
    rules = rules if ops is None else [rule.bound(ops) for rule in rules]
    weight.to_empty(device=device)
    parameters = {f"{rule.target}.{name}": p for name, p in weight.named_parameters()}
    loader.load(parameters, checkpoint, rules, progress=progress)
    return weight


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_product_are_rounded_each_by_itself(tmp_path: Path, kind: Kind) -> None:
    q, k = drawn(40, 80), drawn(24, 80) * 9
    k[3] = 0
    tensors = {"q.weight": q, "k.weight": k}
    value = loaded(tmp_path, tensors, Rule("qk", ("q.weight", "k.weight"), concat(40, 24)), (64, 80), kind).value
    assert isinstance(value, KINDS[kind])
    wanted = torch.cat([rounded_to(kind)(w)[1] for w in (q, k)]).nan_to_num()
    torch.testing.assert_close(value.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_rounds_to_the_bits_of_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    monkeypatch.setitem(staging.THREADS, "cpu", 1)  # the interpreter runs one launch at a time
    interpreter.complete_casts(monkeypatch)
    launched: list[int] = []

    def round_rows(rows: torch.Tensor, kind: Kind) -> Any:
        launched.append(len(rows))
        return bound(Op("round_rows"))(rows, kind)

    tensors, rule = {"w.weight": drawn(40, 80).bfloat16()}, Rule("w", ("w.weight",))
    wanted = loaded(tmp_path, tensors, rule, (40, 80), kind)
    monkeypatch.setattr(runs, "MADE_BYTES", {kind: {"rows": 2000, "columns": 2000} for kind in ("cpu", "cuda")})
    ops = SimpleNamespace(round_rows=round_rows)
    made = dict(loaded(tmp_path, tensors, rule, (40, 80), kind, ops=ops, device=device).named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(made[name].cpu().view(torch.uint8), parameter.view(torch.uint8)), name
    assert sum(launched) == 40
    assert max(launched) < 40


def by_definition(kind: Kind, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and scales of a matrix [N, K], in float32 step by step."""
    wide = source.float()
    if kind == "int4":
        parts = torch.nn.functional.pad(wide, (0, -wide.shape[1] % 32)).unflatten(1, (-1, 32))
        scale = (parts.abs().amax(dim=2) / 7.5).clamp(min=1e-10).bfloat16()
        numbers = ((parts / scale.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
        low, high = numbers[:, : wide.shape[1]].unflatten(1, (-1, 2)).unbind(2)
        return (low | high << 4).view(torch.int32), scale
    scale = (wide.abs().amax(dim=1, keepdim=True) / (448 if kind == "fp8" else 127.5)).clamp(min=1e-10)
    if kind == "fp8":
        return (wide / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale
    return (wide / scale).round().clamp(-128, 127).to(torch.int8), scale


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_matrix_is_read_once_in_parts_and_rounded_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(runs, "BUFFER_BYTES", 1000)
    source = (drawn(40, 80) * 3).to(dtype)
    source[3], source[:, :32] = 0, source[:, :32] * 1e-4
    reports: list[tuple[int, int]] = []
    weight = loaded(
        tmp_path, {"q.weight": source}, Rule("q", ("q.weight",)), (40, 80), kind, progress=lambda *r: reports.append(r)
    )
    for held, wanted in zip((weight.data, weight.scale), by_definition(kind, source), strict=True):
        assert held.dtype == wanted.dtype
        assert torch.equal(held.view(torch.uint8), wanted.view(torch.uint8))
    assert reports[-1] == (source.nbytes, source.nbytes)
    assert len(reports) > 1


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_shared_experts_behind_the_others_share_the_scales_of_their_rows(tmp_path: Path, kind: Kind) -> None:
    rounds = rounded_to(kind)
    downs = {"0.weight": drawn(40, 16), "1.weight": drawn(40, 16) + 1, "s.weight": drawn(40, 32)}
    value = loaded(tmp_path, downs, Rule("down", tuple(downs), SharedBehind()), (4, 40, 16), kind).value
    shared = rounds(downs["s.weight"])[1]
    wanted = torch.stack([rounds(downs["0.weight"])[1], rounds(downs["1.weight"])[1], shared[:, :16], shared[:, 16:]])
    torch.testing.assert_close(value.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)
    ups = {"0.g.weight": drawn(16, 40), "0.u.weight": drawn(16, 40) + 1, "s.g.weight": drawn(32, 40)}
    ups["s.u.weight"] = drawn(32, 40) - 1
    value = loaded(tmp_path, ups, Rule("up", tuple(ups), SharedBehindConcat()), (3, 32, 40), kind).value
    g, u = rounds(ups["s.g.weight"])[1], rounds(ups["s.u.weight"])[1]
    torch.testing.assert_close(value.matrix(2).dense(torch.float32), torch.cat([g[16:], u[16:]]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_transform_makes_is_rounded(tmp_path: Path, kind: Kind) -> None:
    """As gpt-oss keeps its experts: inputs first, columns of gate and up in turn."""
    stored = drawn(64, 48)
    rule = Rule("gate", ("w",), transform=Transposed())
    value = loaded(tmp_path, {"w": stored}, rule, (48, 64), kind).value
    assert isinstance(value, KINDS[kind])
    wanted = rounded_to(kind)(stored.T.contiguous())[1]
    torch.testing.assert_close(value.dense(torch.float32), wanted, rtol=1e-6, atol=1e-7)
    with pytest.raises(WeightsError, match=r"misshapen: w \[64, 40\]"):
        loaded(tmp_path, {"w": drawn(64, 40)}, rule, (48, 64), kind)


def test_groups_of_inputs_cannot_be_shared_out_among_experts() -> None:
    rules = [Rule("down", ("0.weight", "s.weight"), SharedBehind())]
    assert shared_apart(rules, None, None, "int4")
    assert not shared_apart(rules, None, None, "int8")
    assert not shared_apart(rules, None, None)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_what_speaks_tokens_and_what_is_read_dense_keep_their_numbers(tmp_path: Path, name: str) -> None:
    tensors = {"e.weight": drawn(24, 32).bfloat16()}
    assert isinstance(loaded(tmp_path, tensors, Rule(name, ("e.weight",)), (24, 32), "int8").value, Dense)
    value = loaded(tmp_path, tensors, Rule("kv_up", ("e.weight",)), (24, 32), "int8", dense=True).value
    assert torch.equal(value.dense(torch.bfloat16), tensors["e.weight"])


def test_a_source_of_another_shape_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"misshapen: q\.weight \[24, 31\]"):
        loaded(tmp_path, {"q.weight": drawn(24, 31)}, Rule("q", ("q.weight",)), (24, 32), "int4")


def test_a_quantized_checkpoint_is_not_quantized_again() -> None:
    folder = Path(__file__).parents[1] / "models" / "configs"
    with pytest.MonkeyPatch.context() as patch:
        from engine.models import registry

        read = registry._json
        patch.setattr(registry, "_json", lambda path: read(folder / "qwen3-8b-fp8.json"))
        config = EngineConfig(model=str(folder), weights=WeightsConfig(quantize="int8"), load_format="dummy")
        with pytest.raises(ConfigError, match=r"weights\.quantize = 'int8' is for 16-bit checkpoints"):
            build_runner(config)
