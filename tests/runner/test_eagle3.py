"""A head of EAGLE-3 drafts what its definition says, and changes no token."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.core.plan import StepPlan
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.models.reader import ConfigError
from engine.quant.formats.rounded import Rounded
from engine.runner.build import build_runner
from engine.runner.draft_head import HeadDrafter
from engine.weights.checkpoint import WeightsError
from tests.runner import eagle3_heads as heads
from tests.runner.proposals import Proposals, prompts, run
from tests.runner.test_drafts import FAMILIES, plain, play, played, same
from tests.runner.test_graphs import Recorder

LAYERS = 6


def eagle3(folder: Path, tokens: int = 3) -> SpeculationConfig:
    return SpeculationConfig(method="eagle3", model=str(folder), tokens=tokens)


def model(folder: Path, branch: float, groups: int = 2) -> transformers.LlamaForCausalLM:
    """A checkpoint whose layers add `branch` times what they would to the residual stream."""
    torch.manual_seed(3)
    made = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=heads.VOCAB,
            hidden_size=heads.HIDDEN,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=groups,
            max_position_embeddings=256,
            eos_token_id=7,
            bos_token_id=None,
        )
    )
    for name, parameter in made.named_parameters():
        if parameter.dim() == 2:
            parameter.data.normal_(0.0, 1.0 if "embed" in name else parameter.shape[1] ** -0.5)
            if "o_proj" in name or "down_proj" in name:
                parameter.data *= branch
    made.lm_head.weight.data *= 3
    made.save_pretrained(folder)
    return made.eval()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("target")
    return folder, model(folder, 0.5)


def config_for(folder: Path, head: Path, tokens: int = 3, overlap: bool = True, **limits: int) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        scheduler=SchedulerConfig(max_rows=limits.get("rows", 3), token_budget=limits.get("budget", 40)),
        cache=CacheConfig(num_blocks=limits.get("blocks", 60)),
        runtime=RuntimeConfig(device="cpu", dtype="float32", overlap=overlap),
        speculation=eagle3(head, tokens),
    )


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
@pytest.mark.parametrize("layout", ["published", "speculators"])
def test_drafts_are_those_of_the_definition(
    target: tuple[Path, transformers.LlamaForCausalLM], tmp_path: Path, layout: str, padded: bool
) -> None:
    """Behind prompts that came in chunks and were computed again, with drafts that stood and drafts that did not."""
    folder, reference = target
    config = heads.PUBLISHED if layout == "published" else heads.SPECULATORS
    held = heads.tensors(config, own_embedding=layout == "speculators")
    head = heads.write(tmp_path / "head", config, held)
    definition = heads.Definition(config, held, reference.model.embed_tokens.weight)
    taps = [2, LAYERS // 2, LAYERS - 3] if layout == "published" else [0, 3, 6]
    # Behind the last layer transformers norms; what a head reads is not.
    last: list[torch.Tensor] = []
    reference.model.layers[-1].register_forward_hook(
        lambda _, __, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    settings = config_for(folder, head, blocks=14)
    runner = build_runner(settings)
    if padded:
        runner.use_graphs(Recorder())
    assert runner._draft_head is not None
    proposals = Proposals(runner._draft_head)
    engine = Engine(runner, settings)
    run(engine, prompts(6, temperature=0.0))
    assert engine.stats().preemptions > 0
    assert len(proposals.seen) > 60
    for text, drafts in proposals.seen[::4]:
        with torch.no_grad():
            states = reference(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            seen = torch.cat([(last[-1] if tap == LAYERS else states[tap])[0] for tap in taps], dim=1)
            assert drafts == definition.drafts(text, seen, len(drafts))


@pytest.fixture(scope="module")
def dummies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Families without weights, each with a head of its width."""
    made = {}
    for name, config in FAMILIES.items():
        folder, head = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp("head")
        (folder / "config.json").write_text(json.dumps(config))
        own = {"hidden_size": config["hidden_size"], "max_position_embeddings": 128, "head_dim": 16}
        taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
        made[name] = (folder, heads.write(head, {**heads.PUBLISHED, **own, **taps}))
    return made


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "padded"])
@pytest.mark.parametrize(("family", "overlap", "seed"), played(FAMILIES, ("dense",)))
def test_a_head_changes_no_token(
    dummies: dict[str, tuple[Path, Path]], family: str, overlap: bool, seed: int, padded: bool
) -> None:
    folder, head = dummies[family]
    got, stats = play(folder, seed, eagle3(head), overlap=overlap, capture=Recorder() if padded else None)
    same(got, plain(folder, seed))
    assert stats.draft_tokens > 0


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose next token follows from the last one alone, and a head that knows as much: its attention finds the
    embedding of the token that it is at."""
    folder, head = tmp_path_factory.mktemp("chain"), tmp_path_factory.mktemp("right")
    model(folder, 0.0)
    held = load_file(folder / "model.safetensors")
    width = heads.HIDDEN
    # A channel that turns fast says where a token stands, which is not asked for.
    slow = torch.ones(width)
    slow[[0, 1, 2, 3, width // 2, width // 2 + 1, width // 2 + 2, width // 2 + 3]] = 0
    zero, eye = torch.zeros(width, width), torch.eye(width)
    made = {
        "fc.weight": torch.zeros(width, 3 * width),
        "norm.weight": torch.ones(width),
        "lm_head.weight": held["lm_head.weight"],
        "midlayer.hidden_norm.weight": torch.zeros(width),
        "midlayer.input_layernorm.weight": torch.ones(width),
        "midlayer.post_attention_layernorm.weight": torch.ones(width),
        "midlayer.self_attn.q_proj.weight": torch.cat((6 * slow.diag(), zero), dim=1),
        "midlayer.self_attn.k_proj.weight": torch.cat((6 * slow.diag(), zero), dim=1),
        "midlayer.self_attn.v_proj.weight": torch.cat((eye, zero), dim=1),
        "midlayer.self_attn.o_proj.weight": eye,
        "midlayer.mlp.gate_proj.weight": torch.zeros(96, width),
        "midlayer.mlp.up_proj.weight": torch.zeros(96, width),
        "midlayer.mlp.down_proj.weight": torch.zeros(width, 96),
    }
    own = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width, "rope_theta": 1e12}
    named = {"draft_vocab_size": heads.VOCAB, "norm_before_residual": True}
    heads.write(head, {**heads.PUBLISHED, **own, **named}, made)
    return folder, head


@pytest.mark.parametrize(
    ("overlap", "padded"), [(True, True), pytest.param(True, False, marks=pytest.mark.slow), (False, False)]
)
def test_drafts_of_a_head_that_knows_stand(right: tuple[Path, Path], overlap: bool, padded: bool) -> None:
    """Greedy and sampled, since drafts are drawn by the model's own noise; beside requests that draw under edits."""
    folder, head = right
    asked = [*prompts(4, temperature=0.0), *prompts(4, 4, temperature=0.7, top_p=0.9)]
    edited = prompts(3, 8, temperature=0.0, logit_bias={5: -100.0})
    settings = config_for(folder, head, tokens=4, overlap=overlap, rows=6)
    bare = replace(settings, speculation=SpeculationConfig())
    plain, runner = build_runner(bare), build_runner(settings)
    if padded:
        runner.use_graphs(Recorder())
    reference, engine = Engine(plain, bare), Engine(runner, settings)
    same(run(engine, asked), run(reference, asked))
    stats = engine.stats()
    assert stats.accepted_tokens > 0.99 * stats.draft_tokens > 100
    same(run(engine, edited), run(reference, edited))
    assert engine.stats().accepted_tokens - stats.accepted_tokens > 20


@pytest.mark.parametrize("quantize", ["fp8", "int8", "int4"])
def test_a_rounded_head_changes_no_token_and_most_of_its_drafts_stand(
    right: tuple[Path, Path], quantize: Literal["fp8", "int8", "int4"]
) -> None:
    """All of its products are rounded, that of the draft vocabulary too. A head that knew still mostly does."""
    folder, head = right
    settings = config_for(folder, head, tokens=4, rows=6)
    settings = replace(settings, speculation=replace(settings.speculation, quantize=quantize))
    runner = build_runner(settings)
    assert runner._draft_head is not None
    held = runner._draft_head._head.weights
    assert {name: isinstance(weight.held, Rounded) for name, weight in held.items()} == dict.fromkeys(held, True)
    asked = [*prompts(4, temperature=0.0), *prompts(4, 4, temperature=0.7, top_p=0.9)]
    bare = replace(settings, speculation=SpeculationConfig())
    reference, engine = Engine(build_runner(bare), bare), Engine(runner, settings)
    same(run(engine, asked), run(reference, asked))
    stats = engine.stats()
    assert stats.accepted_tokens > 0.6 * stats.draft_tokens > 60


def test_a_head_that_does_not_fit_is_refused_with_a_sentence(
    target: tuple[Path, transformers.LlamaForCausalLM], tmp_path: Path
) -> None:
    folder, _ = target
    held = heads.tensors(heads.PUBLISHED, own_embedding=False)

    def refused(sentence: str, error: type[Exception] = ConfigError, **changed: Any) -> None:
        tensors = {name: tensor for name, tensor in held.items() if name not in changed.get("without", ())}
        config = {**heads.PUBLISHED, **{key: value for key, value in changed.items() if key not in ("without", "more")}}
        head = heads.write(tmp_path / "head", config, {**tensors, **changed.get("more", {})})
        with pytest.raises(error, match=sentence):
            build_runner(config_for(folder, head))

    refused("another vocabulary", vocab_size=300)
    refused("no EAGLE-3 head", architectures=["LlamaForCausalLM"])
    refused("target_hidden_size = 128", target_hidden_size=128)
    refused("parallel_drafting", parallel_drafting=True)
    refused("use_aux_hidden_state", eagle_config={"use_aux_hidden_state": False})
    refused("does not have", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, LAYERS]})
    refused("missing: fc.weight", WeightsError, without=("fc.weight",))
    refused("misshapen: fc.weight", WeightsError, more={"fc.weight": torch.zeros(heads.HIDDEN, 2 * heads.HIDDEN)})
    refused("no embed_tokens of its own", hidden_size=32)
    twice = held["d2t"].clone()
    twice[1] = twice[0] - 1
    refused("one of them twice", WeightsError, more={"d2t": twice})
    refused("beyond the 320", WeightsError, more={"d2t": held["d2t"] + 500})


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded"])
def test_a_head_follows_only_the_steps_whose_plan_says_so(
    dummies: dict[str, tuple[Path, Path]], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are worse behind the others, and no token changes."""
    folder, head = dummies["dense"]
    want = plain(folder, 2)
    follow, schedule = HeadDrafter.follow, Scheduler.schedule
    followed, said = [], []

    def counted(self: HeadDrafter, *given: Any) -> None:
        followed.append(given)
        follow(self, *given)

    def every_third(self: Scheduler) -> tuple[StepPlan, list[Request]] | None:
        planned = schedule(self)
        if planned is None:
            return None
        said.append(planned[0].step % 3 == 0)
        return dataclasses.replace(planned[0], follows=said[-1]), planned[1]

    monkeypatch.setattr(HeadDrafter, "follow", counted)
    monkeypatch.setattr(Scheduler, "schedule", every_third)
    got, stats = play(folder, 2, eagle3(head), overlap=True, capture=Recorder() if padded else None)
    same(got, want)
    assert stats.draft_tokens > 0
    assert 0 < said.count(True) < len(said) / 2
    made = len(followed) - said.count(True)
    assert made > 0 if padded else not made, "a graph's first step follows once more"
