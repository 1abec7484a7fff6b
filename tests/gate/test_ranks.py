"""The gate with several ranks: each family on two, in float32, against transformers on one. Ranks are threads that
talk over gloo, as processes on CPUs do. Broken ranks must fail it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.config import CacheConfig, EngineConfig, ParallelConfig, RuntimeConfig, SchedulerConfig, WeightsConfig
from engine.core.plan import StepPlan
from engine.models.reader import ConfigError
from engine.parallel import shard as parallel_shard
from engine.parallel.communicator import Communicator, GroupCommunicator
from engine.parallel.shard import Shard
from engine.quant.formats.shares import Slots, Spread
from engine.runner.build import build_runner
from engine.runner.runner import DeviceRunner
from engine.types import TokenLogprobs
from tests.gate.conftest import as_param, quick
from tests.gate.families import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V4_BLOCKS,
    FAMILIES,
    GPT_OSS,
    KIMI,
    QWEN3_5,
    QWEN3_MOE,
)
from tests.gate.oracle import Golden, golden
from tests.gate.packings import PACKINGS, packed_golden
from tests.gate.plans import PlanPlayer
from tests.gate.shapes import SHAPES, Shape
from tests.gate.verdict import judge
from tests.parallel.ranks import together

WHOLE = 1 << 20
# gpt-oss goes with whole experts alone.
SHARED = [as_param(shape) for shape in (*SHAPES, *FAMILIES) if shape is not GPT_OSS]

Broken = Callable[[DeviceRunner, int], None]


def of_ranks(truth: Golden, shape: Shape, size: int, **parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=str(truth.folder),
        max_model_len=600,
        scheduler=SchedulerConfig(max_rows=48, token_budget=8192),
        cache=CacheConfig(block_size=shape.block_size, num_blocks=1024 * 16 // shape.block_size),
        runtime=RuntimeConfig(device="cpu", dtype="float32"),
        parallel=ParallelConfig(tensor=size, **parallel),
    )


def play(
    config: EngineConfig, truth: Golden, broken: Broken | None = None, chunk: int = WHOLE
) -> list[list[list[TokenLogprobs]]]:
    """What each rank says of all sequences."""

    def work(communicator: Communicator) -> list[list[TokenLogprobs]]:
        runner = build_runner(config, communicator=communicator)
        if broken is not None:
            broken(runner, communicator.rank)
        return PlanPlayer(runner, chunk).play(truth.sequences)

    return together(config.parallel.tensor, work)


@pytest.mark.parametrize("shape", SHARED, indirect=True)
def test_two_ranks(truth: Golden, shape: Shape) -> None:
    played = play(of_ranks(truth, shape, 2), truth)
    assert played[0] == played[1], "ranks must hold the same bits, or they would draw different tokens"
    verdict = judge(truth.sequences, played[0], "float32")
    assert verdict.passes("float32"), verdict


# DeepSeek-V4's two groups of outputs do not go into three.
ROUTED = [
    pytest.param(shape, size, id=f"{shape.name}-{size}", marks=as_param(shape).marks)
    for shape in (QWEN3_MOE, DEEPSEEK_V2, KIMI, DEEPSEEK_V3, DEEPSEEK_V4, GPT_OSS)
    for size in (2, 3)
    if shape is not DEEPSEEK_V4 or size == 2
]


@pytest.mark.parametrize(("shape", "size"), ROUTED, indirect=["shape"])
def test_whole_experts(truth: Golden, shape: Shape, size: int) -> None:
    held: list[int] = []
    played = play(of_ranks(truth, shape, size, expert="whole"), truth, lambda runner, _: held.append(_experts(runner)))
    assert max(held) - min(held) <= 1
    named = ("n_routed_experts", "num_experts", "num_local_experts")
    assert [sum(held)] == [shape.config[name] for name in named if name in shape.config]
    assert played == [played[0]] * size
    verdict = judge(truth.sequences, played[0], "float32")
    assert verdict.passes("float32"), verdict


# Prompts whole, in chunks that go to the tokens, and on ranks with heads of different number.
SLICED = [
    pytest.param(shape, size, chunk, id=f"{shape.name}-{size}-{chunk}", marks=as_param(shape).marks)
    for shape in (DEEPSEEK_V2, KIMI, DEEPSEEK_V3)
    for size, chunk in ((2, WHOLE), (2, 7), (3, 50))
]


@pytest.mark.parametrize(("shape", "size", "chunk"), SLICED, indirect=["shape"])
def test_sliced_context(truth: Golden, shape: Shape, size: int, chunk: int) -> None:
    played = play(of_ranks(truth, shape, size, context="sliced"), truth, chunk=chunk)
    assert played == [played[0]] * size
    verdict = judge(truth.sequences, played[0], "float32")
    assert verdict.passes("float32"), verdict


def _experts(runner: DeviceRunner) -> int:
    """Of a layer, on this rank."""
    return int(runner._decoder.layers[-1].ffn.gate_up.shape[0])


ONE = [as_param(shape) for shape in SHAPES if shape.name == "qwen3"]
# Layers with a state, and with compressed entries.
SPARSE = [as_param(QWEN3_MOE)]
STATED = [as_param(shape) for shape in (QWEN3_5, DEEPSEEK_V4)]


@pytest.mark.parametrize("shape", ONE, indirect=True)
@pytest.mark.parametrize("size", [2, 3])
def test_batch_and_chunks_change_no_bit(truth: Golden, shape: Shape, size: int) -> None:
    config = of_ranks(truth, shape, size)
    config = replace(config, runtime=replace(config.runtime, deterministic=True))
    sequences = truth.sequences[:: len(truth.sequences) // 6]

    def work(communicator: Communicator) -> list[list[list[TokenLogprobs]]]:
        runner = build_runner(config, communicator=communicator)
        alone = [PlanPlayer(runner, WHOLE).play([sequence])[0] for sequence in sequences]
        return [alone, PlanPlayer(runner, WHOLE).play(sequences), PlanPlayer(runner, 7).play(sequences)]

    for alone, together_, in_chunks in together(size, work):
        assert alone == together_ == in_chunks


def swapped_slice(runner: DeviceRunner, rank: int) -> None:
    """One layer multiplies by the other half of a projection's inputs."""
    weight = runner._decoder.layers[0].mixer.out.weight
    data = weight.value.data
    data.copy_(data.roll(data.shape[1] // 2, 1))


def missing_sum(runner: DeviceRunner, rank: int) -> None:
    runner._decoder.layers[1].ffn.down.communicator = Communicator()


def missing_sum_of_a_mixer(runner: DeviceRunner, rank: int) -> None:
    runner._decoder.layers[1].mixer.out.communicator = Communicator()


def one_residual_more(runner: DeviceRunner, rank: int) -> None:
    class Twice(GroupCommunicator):
        def on_first_rank(self, x: torch.Tensor | None) -> torch.Tensor | None:
            return x

    down = runner._decoder.layers[1].ffn.down
    down.communicator.__class__ = Twice


def swapped_logits(runner: DeviceRunner, rank: int) -> None:
    vocabulary: Any = runner._decoder.vocabulary
    whole = vocabulary.whole
    vocabulary.whole = lambda logits: whole(logits).roll(vocabulary.count, 1)


def one_step_behind(runner: DeviceRunner, rank: int) -> None:
    """The second rank computes the position before the one that the first computes."""
    if rank == 0:
        return
    launch = runner.launch

    def late(plan: StepPlan) -> Any:
        return launch(replace_fields(plan, first=[max(0, first - 1) for first in plan.first]))

    runner.launch = late  # type: ignore[method-assign]


@pytest.mark.parametrize("shape", ONE, indirect=True)
@pytest.mark.parametrize(
    "broken", [swapped_slice, missing_sum, one_residual_more, swapped_logits, one_step_behind], ids=lambda b: b.__name__
)
def test_a_broken_rank_fails(truth: Golden, shape: Shape, broken: Broken) -> None:
    fails(truth, shape, broken)


@pytest.mark.parametrize("shape", STATED, indirect=True)
@pytest.mark.parametrize("broken", [swapped_slice, missing_sum_of_a_mixer, one_step_behind], ids=lambda b: b.__name__)
def test_a_broken_rank_of_a_state_fails(truth: Golden, shape: Shape, broken: Broken) -> None:
    fails(truth, shape, broken)


def shifted_experts(runner: DeviceRunner, rank: int) -> None:
    """The second rank takes each of its experts for the next."""
    moe = runner._decoder.layers[1].ffn
    first, last = moe.config.held
    if rank == 1:
        moe.config = replace_fields(moe.config, held=(first + 1, last + 1))


def missing_sum_of_experts(runner: DeviceRunner, rank: int) -> None:
    runner._decoder.layers[1].ffn._communicator = Communicator()


@pytest.mark.parametrize("shape", SPARSE, indirect=True)
@pytest.mark.parametrize("broken", [shifted_experts, missing_sum_of_experts], ids=lambda b: b.__name__)
def test_broken_whole_experts_fail(truth: Golden, shape: Shape, broken: Broken) -> None:
    fails(truth, shape, broken, expert="whole")


@pytest.mark.parametrize("shape", SPARSE, indirect=True)
def test_an_expert_on_two_ranks_fails(truth: Golden, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted twice."""
    channels = parallel_shard._channels

    def overlapping(ffn: Any, shard: Shard) -> Any:
        made = channels(ffn, shard)
        count, (first, last) = made.get("experts", (0, (0, 0)))
        return made | {"experts": (count, (max(0, first - 1), last))}

    monkeypatch.setattr(parallel_shard, "_channels", overlapping)
    fails(truth, shape, expert="whole")


def unweighted_partials(runner: DeviceRunner, rank: int) -> None:
    """The sum over ranks takes one rank's share for the whole."""
    shared = runner._decoder.layers[1].mixer._context

    def own_heads(o: torch.Tensor, lse: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        merged = shared._communicator.all_reduce(o.clone()) / 2
        return merged[:, shared._first : shared._first + shared._heads[rank]].to(dtype)

    shared.own_heads = own_heads


def tokens_of_the_other(runner: DeviceRunner, rank: int) -> None:
    """Both ranks keep the same share."""
    runner._inputs._pool = replace_fields(runner._inputs._pool, rank=0)


def missing_queries(runner: DeviceRunner, rank: int) -> None:
    """The heads of the other rank ask with this rank's queries."""
    shared = runner._decoder.layers[1].mixer._context
    shared.all_heads = lambda q: torch.cat((q, q), dim=1)


def test_biases_of_experts_are_not_sliced(tmp_path: Any) -> None:
    from tests.gate.oracle import random_model

    random_model(GPT_OSS).save_pretrained(tmp_path)
    config = of_ranks(Golden(tmp_path, [], None), GPT_OSS, 2, expert="sliced")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"experts with biases, which parallel\.expert auto or whole deals out"):
        together(2, lambda c: build_runner(config, communicator=c))


@pytest.mark.parametrize("shape", [as_param(DEEPSEEK_V2)], indirect=True)
@pytest.mark.parametrize(
    "broken", [unweighted_partials, tokens_of_the_other, missing_queries, one_step_behind], ids=lambda b: b.__name__
)
def test_a_broken_context_fails(truth: Golden, shape: Shape, broken: Broken) -> None:
    fails(truth, shape, broken, context="sliced")


def fails(truth: Golden, shape: Shape, broken: Broken | None = None, **parallel: Any) -> None:
    few = replace_fields(truth, sequences=truth.sequences[::8])
    played = play(of_ranks(few, shape, 2, **parallel), few, broken)
    verdict = judge(few.sequences, played[0], "float32")
    assert not verdict.passes("float32"), verdict


def packed_passes(shape: Shape, name: str, config: pytest.Config) -> tuple[EngineConfig, Golden]:
    """Plays a packed checkpoint on two ranks, which must agree and be right: how, and what."""
    truth = _packed(shape, name, config)
    two = replace(of_ranks(truth, shape, 2), weights=WeightsConfig(activations="16bit"))
    played = play(two, truth)
    assert played[0] == played[1]
    verdict = judge(truth.sequences, played[0], "float32")
    assert verdict.passes("float32"), verdict
    return two, truth


EVEN = replace_fields(
    SHAPES[2],
    name="even",
    sequences=12,
    long_prompt=300,
    dtypes=("float32",),
    config={**SHAPES[2].config, "hidden_size": 320, "intermediate_size": 512},
)
QUANTIZED = (
    *("fp8-blocks-f32", "fp8-rows", "ct-int4-g32", "ct-int8-g128-zeros", "awq", "ct-w8a8-static"),
    *("ct-mxfp8", "modelopt-fp8-pb-wo", "modelopt-mixed", "ct-parts", "ct-w4a8", "gptq-v1", "gptq-v1-8-channel"),
)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_cut_by_their_blocks(name: str, pytestconfig: pytest.Config) -> None:
    packed_passes(EVEN, name, pytestconfig)


SECTIONS = replace_fields(
    quick(QWEN3_5), name="sections", config={**QWEN3_5.config, "hidden_size": 160, "intermediate_size": 256}
)


@pytest.mark.parametrize("name", ["fp8-blocks-bf16", "awq", "gptq-v1", "gptq-v1-order"])
def test_projections_in_one_matrix_are_cut_each(name: str, pytestconfig: pytest.Config) -> None:
    packed_passes(SECTIONS, name, pytestconfig)


def test_deepseek_v4_as_it_is_published_is_cut_by_its_blocks(pytestconfig: pytest.Config) -> None:
    packed_passes(quick(DEEPSEEK_V4_BLOCKS), "as-v4-is-published", pytestconfig)


# Blocks and groups are as large as an expert.
NARROW = replace_fields(
    QWEN3_MOE,
    name="narrow-experts",
    sequences=12,
    long_prompt=300,
    dtypes=("float32",),
    config={**QWEN3_MOE.config, "intermediate_size": 256, "moe_intermediate_size": 32},
)
PACKED_EXPERTS = [(NARROW, name) for name in ("fp8-blocks-f32", "ct-mxfp4", "ct-int4-g32", "w4afp8", "ct-parts")] + [
    (KIMI, "ct-int4-experts")
]


@pytest.mark.parametrize(("shape", "name"), PACKED_EXPERTS, ids=[f"{s.name}-{name}" for s, name in PACKED_EXPERTS])
def test_whole_experts_keep_their_blocks(shape: Shape, name: str, pytestconfig: pytest.Config) -> None:
    config, truth = packed_passes(quick(shape) if shape in FAMILIES else shape, name, pytestconfig)
    sliced = replace(config, parallel=ParallelConfig(tensor=2, expert="sliced"))
    with pytest.raises(ConfigError, match=r"parallel\.expert auto or whole leaves experts"):
        play(sliced, truth)


# Three ranks have unequal numbers of heads, and two of the channels of these experts.
WIDER = replace_fields(
    NARROW, name="wider-experts", config={**NARROW.config, "intermediate_size": 256, "moe_intermediate_size": 96}
)
ORDERED = (
    *((EVEN, name, 2) for name in ("gptq-v1-order", "gptq-v2-8-order", "ct-int4-zeros-order")),
    (EVEN, "gptq-v1-order", 3),
    (WIDER, "gptq-v1-order", 2),
)


@pytest.mark.parametrize(("shape", "name", "size"), ORDERED, ids=[f"{s.name}-{name}-{n}" for s, name, n in ORDERED])
def test_inputs_in_an_order_are_shared(shape: Shape, name: str, size: int, pytestconfig: pytest.Config) -> None:
    truth, parts = _packed(shape, name, pytestconfig), list[tuple[int, int]]()

    def heard(runner: DeviceRunner, rank: int) -> None:
        layer: Any = runner._decoder.layers[1]
        values = [layer.mixer.out.weight.value, getattr(layer.ffn.down, "weight", layer.ffn.down).value]
        parts.extend((value.inputs, value.columns) for value in values)

    played = play(of_ranks(truth, shape, size, expert="sliced"), truth, heard)
    assert played == [played[0]] * size
    assert any(columns > inputs for inputs, columns in parts)
    verdict = judge(truth.sequences, played[0], "float32")
    assert verdict.passes("float32"), verdict


def groups_of_others(made: Spread) -> Spread:
    return made._replace(groups=made.groups.roll(1))


def empty_columns_with_numbers(made: Spread) -> Spread:
    return made._replace(filled=torch.ones_like(made.filled))


@pytest.mark.parametrize("change", [groups_of_others, empty_columns_with_numbers], ids=lambda c: c.__name__)
def test_shares_that_are_held_wrongly_fail(
    change: Callable[[Spread], Spread], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, spread = _packed(EVEN, "gptq-v1-order", pytestconfig), Slots.spread
    monkeypatch.setattr(Slots, "spread", lambda self, groups: change(spread(self, groups)))
    played = play(of_ranks(truth, EVEN, 2), truth)
    verdict = judge(truth.sequences, played[0], "float32")
    assert not verdict.passes("float32"), verdict


def test_borders_in_a_block_are_refused(pytestconfig: pytest.Config) -> None:
    truth = _packed(quick(SHAPES[2]), "fp8-blocks-f32", pytestconfig)
    with pytest.raises(ConfigError, match="a feed-forward part of 224 channels is stored in runs of 128"):
        play(of_ranks(truth, SHAPES[2], 2), truth)


def _packed(shape: Shape, name: str, config: pytest.Config) -> Golden:
    cache = Path(config.rootpath) / ".cache" / "gate"
    (packing,) = (packing for packing in PACKINGS if packing.name == name)
    truth = packed_golden(shape, golden(shape, cache), packing, cache)
    return replace_fields(truth, sequences=truth.sequences[:4])


DENSE = SHAPES[2]
ONE_KEY_HEAD = {
    **{"num_attention_heads": 3, "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 5},
    **{"linear_key_head_dim": 24, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
    "num_hidden_layers": 2,
}
THREE_GROUPS = {"num_attention_heads": 6, "o_groups": 3, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4]}
ODD: Sequence[tuple[str, Shape, dict[str, Any], int]] = (
    (
        "three-kv-heads-on-two",
        DENSE,
        {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 3},
        2,
    ),
    ("one-kv-head-on-three", DENSE, {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 1}, 3),
    ("two-kv-heads-on-three", DENSE, {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 2}, 3),
    ("odd-vocabulary-on-two", DENSE, {"vocab_size": 509}, 2),
    ("channels-that-do-not-halve", DENSE, {"intermediate_size": 161}, 2),
    ("three-key-heads-on-two", QWEN3_5, {"linear_num_key_heads": 3, "linear_num_value_heads": 6}, 2),
    ("one-key-head-on-three", QWEN3_5, ONE_KEY_HEAD, 3),
    ("three-groups-on-two", DEEPSEEK_V4, THREE_GROUPS, 2),
)


@pytest.mark.parametrize(("shape", "changes", "size"), [o[1:] for o in ODD], ids=[o[0] for o in ODD])
def test_what_does_not_divide(shape: Shape, changes: dict[str, Any], size: int, tmp_path: Any) -> None:
    """Ranks of different sizes say what one says."""
    from tests.gate.oracle import random_model

    random_model(replace_fields(shape, config={**shape.config, **changes})).save_pretrained(tmp_path)
    prompts = [[5 * i + j for j in range(20 + 3 * i)] for i in range(4)]
    alone = of_ranks(Golden(tmp_path, [], None), shape, 1)  # type: ignore[arg-type]
    one = _drawn(build_runner(alone), prompts)
    config = replace(alone, parallel=ParallelConfig(tensor=size))
    several = together(size, lambda c: _drawn(build_runner(config, communicator=c), prompts))
    assert several == [several[0]] * size
    for ours, theirs in zip(several[0], one, strict=True):
        assert ours.ids == theirs.ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_more_ranks_than_groups_of_outputs_are_refused(tmp_path: Any) -> None:
    from tests.gate.oracle import random_model

    random_model(DEEPSEEK_V4).save_pretrained(tmp_path)
    config = of_ranks(Golden(tmp_path, [], None), DEEPSEEK_V4, 4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="its 2 groups of outputs, each of 2 heads, are too few for 4"):
        together(4, lambda c: build_runner(config, communicator=c))


def _drawn(runner: DeviceRunner, prompts: list[list[int]]) -> list[TokenLogprobs]:
    """The first token of each prompt, with its log-probabilities."""
    from engine.cache.spec import Recurrent
    from engine.cache.writes import BlockWrite
    from engine.core.plan import RowStart
    from engine.types import SamplingParams

    pool, params = runner.info.pool, SamplingParams(temperature=0.0, logprobs=8)
    starts = [
        RowStart(i, prompt, len(prompt), params, state_slot=i + 1 if pool.num_state_slots else 0)
        for i, prompt in enumerate(prompts)
    ]
    writes = [
        BlockWrite(group, i, 0, [1 + 4 * i + j for j in range(4)])
        for group, held in enumerate(pool.groups)
        for i in range(len(prompts))
        if not isinstance(held.spec, Recurrent)
    ]
    rows, counts = list(range(len(prompts))), [len(prompt) for prompt in prompts]
    plan = StepPlan(0, rows, [0] * len(rows), counts, [True] * len(rows), starts, writes)
    result = runner.launch(plan).wait()
    return [result.logprobs[i][0] for i in rows]
