"""Inputs in an order that ranks share: what ranks hold is together the whole matrix, number by number."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.models.config import AttentionConfig, LayerConfig, MlpConfig, ModelConfig, NormConfig
from engine.parallel.communicator import Communicator
from engine.parallel.shard import Shard, runs_of
from engine.parallel.slices import shard_checkpoint
from engine.parallel.vocabulary import Vocabulary
from engine.quant import config
from engine.quant.formats.shares import BLOCK, Slots
from engine.quant.plan import ordered_inputs, plan, shard_alignment
from engine.quant.weight import Weight
from engine.weights import loader, runs, staging
from engine.weights.checkpoint import Checkpoint, WeightsError
from engine.weights.rules import Rule, Split, Stack
from kernels.registry import Op
from kernels.testing import bound
from kernels.weight import Dense, PackedInt
from tests.gate import integers
from tests.gate.integers import Pack, Tensors, compressed, gptq, gptq_config, pack_quantized, with_inputs

# Where kernels run: the interpreter stands in for a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OUTPUTS, INPUTS = 40, 192
MODEL = ModelConfig(
    "test",
    vocab_size=8,
    hidden=OUTPUTS,
    layers=(LayerConfig(AttentionConfig(8, 8, 8, 1.0, None), MlpConfig(INPUTS)),),
    norm=NormConfig(1e-6),
    max_position=64,
    tied=False,
)
INNER = (Split("inputs", "inner"),)
DOWN = Rule("layers.0.down", ("m.layers.0.down.weight",), splits=INNER)
EXPERTS = Rule("layers.0.down", tuple(f"m.layers.0.{e}.down.weight" for e in range(3)), Stack(), splits=INNER)
FORMS = [
    pytest.param(gptq_config(4, 32, True), gptq(4, 32, ordered=True), id="gptq"),
    pytest.param(gptq_config(4, 64, True, sym=True), gptq(4, 64, zeros=False, ordered=True), id="gptq, symmetric"),
    pytest.param(gptq_config(8, 16, True, checkpoint_format="gptq_v2"), gptq(8, 16, 0, ordered=True), id="gptq, int8"),
    pytest.param(
        compressed(4, 32, False, "group"), pack_quantized(4, 32, zeros=True, ordered=True), id="compressed-tensors"
    ),
    pytest.param(compressed(4, 128, True, "group"), pack_quantized(4, 128, ordered=True), id="int4, symmetric"),
    pytest.param(compressed(8, 64, False, "group"), pack_quantized(8, 64, zeros=True, ordered=True), id="int8"),
    pytest.param(compressed(8, 64, True, "dynamic"), pack_quantized(8, 64, ordered=True), id="int8, symmetric"),
]


def stored(folder: Path, pack: Pack, rule: Rule = DOWN, **changes: torch.Tensor) -> torch.Tensor:
    """Writes a checkpoint of the rule's modules; the numbers that they stand for [.., OUTPUTS, INPUTS]."""
    tensors: Tensors = {}
    numbers = []
    for i, source in enumerate(rule.sources):
        matrix = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(i)) + i / 4
        made, meant = pack(matrix)
        tensors |= {source.replace("weight", end): held.contiguous() for end, held in (made | changes).items()}
        numbers.append(meant)
    save_file(tensors, folder / "model.safetensors")
    return torch.stack(numbers) if len(numbers) > 1 else numbers[0]


def loaded(
    folder: Path,
    said: dict[str, Any],
    shard: Shard,
    rule: Rule = DOWN,
    dense: bool = False,
    activations: str = "16bit",
    ops: Any = None,
) -> Weight:
    """What a rank holds of the matrices of a rule."""
    method, whole = config.read({"quantization_config": said}), Checkpoint.open(folder)
    ordered, vocabulary = ordered_inputs([rule], whole, method), Vocabulary(8, Communicator())
    checkpoint = shard_checkpoint(whole, [rule], MODEL, shard, vocabulary, {}, ordered)
    start, stop = runs_of(MODEL.layers[0], MODEL, shard)["inner"][1]
    table = (len(rule.sources),) if len(rule.sources) > 1 else ()
    weight = Weight((*table, OUTPUTS, stop - start), torch.float32, "dense" if dense else "any")
    rules = plan({rule.target: weight}, [rule], checkpoint, method, activations)
    rules = rules if ops is None else [one.bound(ops) for one in rules]
    weight.to_empty(device="cpu" if ops is None else DEVICE)
    loader.load({f"{rule.target}.{name}": p for name, p in weight.named_parameters()}, checkpoint, rules)
    weight.check(rule.target)
    return weight


def shards(said: dict[str, Any], size: int) -> list[Shard]:
    alignment = shard_alignment([DOWN], config.read({"quantization_config": said}))
    return [Shard(rank, size, alignment) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_ranks_hold_the_whole_matrix(tmp_path: Path, said: dict, pack: Pack, size: int) -> None:
    whole = stored(tmp_path, pack)
    values = [loaded(tmp_path, said, shard).value for shard in shards(said, size)]
    for value in values:
        assert isinstance(value, PackedInt)
        assert value.columns % BLOCK == 0
    assert any(isinstance(value, PackedInt) and value.columns > value.inputs for value in values)
    made = torch.cat([value.dense(torch.float32) for value in values], dim=1)
    torch.testing.assert_close(made, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_products_of_ranks_add_up(tmp_path: Path, said: dict, pack: Pack, size: int) -> None:
    """By the definition, and by kernels."""
    whole, x = stored(tmp_path, pack), torch.randn(3, INPUTS, generator=torch.Generator().manual_seed(1))
    made, launched, at = torch.zeros(3, OUTPUTS), torch.zeros(3, OUTPUTS), 0
    for shard in shards(said, size):
        weight = loaded(tmp_path, said, shard)
        own = x[:, at:][:, : weight.shape[1]]
        made += weight.value.product(own)
        launched += bound(Op("linear"))(own.to(DEVICE), weight.to(DEVICE).value).cpu()
        at += weight.shape[1]
    assert at == INPUTS
    torch.testing.assert_close(made, x @ whole.T, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(launched, made, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_experts_have_an_order_each(tmp_path: Path, said: dict, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that needs most columns says how many all have."""
    seeds = count()

    def shuffled(inputs: int, group: int, ordered: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(next(seeds))
        return (torch.arange(inputs) // group)[torch.randperm(inputs, generator=generator)]

    monkeypatch.setattr(integers, "groups_of", shuffled)
    whole = stored(tmp_path, pack, EXPERTS)
    values = [loaded(tmp_path, said, shard, EXPERTS).value for shard in shards(said, 2)]
    made = torch.cat([value.dense(torch.float32) for value in values], dim=2)
    torch.testing.assert_close(made, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(values[1].matrix(2).dense(torch.float32), made[2, :, INPUTS // 2 :])


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_what_is_read_dense_is_dequantized_by_the_groups_of_all(tmp_path: Path, said: dict, pack: Pack) -> None:
    whole = stored(tmp_path, pack)
    values = [loaded(tmp_path, said, shard, dense=True).value for shard in shards(said, 2)]
    assert all(isinstance(value, Dense) for value in values)
    made = torch.cat([value.dense(torch.float32) for value in values], dim=1)
    torch.testing.assert_close(made, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("said", "pack"), FORMS)
def test_kernels_repack_to_the_bits_of_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: dict, pack: Pack
) -> None:
    """In parts too, where numbers can be cut."""
    stored(tmp_path, pack)
    shard = shards(said, 2)[1]
    wanted = loaded(tmp_path, said, shard)
    monkeypatch.setitem(staging.THREADS, "cpu", 1)  # the interpreter runs one launch at a time
    monkeypatch.setattr(runs, "MADE_BYTES", {kind: {"rows": 400, "columns": 400} for kind in ("cpu", "cuda")})
    made = dict(loaded(tmp_path, said, shard, ops=SimpleNamespace(repack=bound(Op("repack")))).named_parameters())
    for name, parameter in wanted.named_parameters():
        assert torch.equal(made[name].cpu(), parameter), name


@pytest.mark.parametrize("kind", ["int", "float"])
def test_rows_are_rounded_before_columns_without_an_input_are_there(tmp_path: Path, kind: str) -> None:
    said, pack = with_inputs(compressed(4, 32, True, "group"), kind), pack_quantized(4, 32, ordered=True)
    stored(tmp_path, pack)
    weight = loaded(tmp_path, said, shards(said, 2)[0], activations="auto")
    x = torch.randn(3, INPUTS // 2, generator=torch.Generator().manual_seed(1))
    scale = x.abs().amax(dim=1, keepdim=True) / (127.5 if kind == "int" else 448)
    ratio = x / scale
    numbers = ratio.round().clamp(-128, 127) if kind == "int" else ratio.to(torch.float8_e4m3fn).float()
    wanted = (numbers * scale) @ weight.value.dense(torch.float32).T
    assert weight.value.rounds_inputs
    torch.testing.assert_close(weight.value.product(x), wanted, rtol=1e-5, atol=1e-5)


@given(data=st.data(), size=st.sampled_from([16, 32]), groups=st.integers(1, 9))
def test_runs_hold_inputs_of_one_group(data: st.DataObject, size: int, groups: int) -> None:
    given_groups = torch.tensor(data.draw(st.lists(st.integers(0, groups - 1), min_size=1, max_size=200)))
    needed = sum(-(-int((given_groups == g).sum()) // size) for g in range(groups))
    slots = Slots(size, groups, -(-needed * size // BLOCK) * BLOCK)
    spread = slots.spread(given_groups)
    inputs = spread.places[spread.filled]
    assert sorted(inputs.tolist()) == list(range(len(given_groups)))
    own = spread.groups.repeat_interleave(size)
    assert torch.equal(own[spread.filled], given_groups[inputs])
    for run in range(len(spread.groups)):
        among = spread.places[run * size :][:size][spread.filled[run * size :][:size]].tolist()
        assert among == sorted(among)


@pytest.mark.parametrize("group", [-1, 6])
def test_groups_that_are_not_there_are_refused(tmp_path: Path, group: int) -> None:
    groups = torch.full((INPUTS,), group, dtype=torch.int32)
    stored(tmp_path, gptq(4, 32, ordered=True), g_idx=groups)
    with pytest.raises(WeightsError, match=r"down\.g_idx names groups of inputs that are not among its 6"):
        loaded(tmp_path, gptq_config(4, 32, True), Shard(0, 2))


def test_zero_points_that_no_number_stands_for_are_refused(tmp_path: Path) -> None:
    stored(tmp_path, gptq(4, 32, ordered=True), qzeros=torch.full((6, OUTPUTS // 8), -1, dtype=torch.int32))
    with pytest.raises(WeightsError, match=r"layers\.0\.down: .* a zero point above 15, .*: set parallel\.tensor to 1"):
        loaded(tmp_path, gptq_config(4, 32, True), Shard(0, 2))


def test_inputs_that_stand_in_their_groups_have_no_order(tmp_path: Path) -> None:
    """Ranks cut their scales too."""
    stored(tmp_path, gptq(4, 32))
    value = loaded(tmp_path, gptq_config(4, 32), Shard(1, 2, 32)).value
    assert isinstance(value, PackedInt)
    assert value.order is None
    assert value.scale.shape == (OUTPUTS, 3)
