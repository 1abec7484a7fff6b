"""A small model that drafts, in the pool of the large one: the same tokens, in fewer steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.models.reader import ConfigError
from engine.quant.formats.rounded import Rounded
from engine.runner.build import build_runner
from engine.types import RequestInput, SamplingParams
from tests.gate import families
from tests.gate.fp8 import float_quantized
from tests.runner.test_drafts import FAMILIES, Heard, in_one_process, plain, play, played, requests, same, small
from tests.runner.test_graphs import Recorder
from tests.runner.tiny import CONFIG, write


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in (*FAMILIES, "draft")}
    for name, config in FAMILIES.items():
        (made[name] / "config.json").write_text(json.dumps(config))
    write(made["draft"], max_position_embeddings=8192, hidden_size=32, num_hidden_layers=1, num_key_value_heads=4)
    return made


def drafted_by(folder: Path) -> SpeculationConfig:
    return SpeculationConfig(method="draft", model=str(folder), tokens=3)


@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eager", "padded"])
@pytest.mark.parametrize(("family", "overlap", "seed"), played(FAMILIES, ("dense",)))
def test_a_draft_model_changes_no_token(
    folders: dict[str, Path], family: str, overlap: bool, seed: int, padded: bool
) -> None:
    capture = Recorder() if padded else None
    got, stats = play(folders[family], seed, drafted_by(folders["draft"]), overlap=overlap, capture=capture)
    same(got, plain(folders[family], seed))
    assert stats.draft_tokens > 0


@pytest.mark.parametrize(
    ("family", "overlap"),
    [
        pytest.param(f, o, marks=[in_one_process(f), *([] if o and f in ("dense", "latents") else [pytest.mark.slow])])
        for f, o in (*((family, True) for family in FAMILIES), ("dense", False))
    ],
)
def test_a_model_that_drafts_for_itself_is_right(folders: dict[str, Path], family: str, overlap: bool) -> None:
    """Greedy or sampled, for drafts are drawn by the same noise, behind prompts that came in chunks, from the prefix
    cache or again: so its own cache holds what it should. Of penalties, biases and bans it knows nothing."""
    accepted = drafted = 0
    for seed in (1, 2):
        recorder = Recorder()
        got, stats = play(folders[family], seed, drafted_by(folders[family]), overlap=overlap, capture=recorder)
        same(got, plain(folders[family], seed))
        accepted, drafted = accepted + stats.accepted_tokens, drafted + stats.draft_tokens
        assert any(of.params.temperature for of in requests(seed))
    assert accepted > 0.3 * drafted


@pytest.mark.parametrize(("overlap", "cache"), [(True, "auto"), (False, "auto"), (True, "fp8")])
def test_drafts_of_a_right_model_all_stand(folders: dict[str, Path], overlap: bool, cache: str) -> None:
    config = EngineConfig(
        model=str(folders["dense"]),
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=4, token_budget=40),
        cache=CacheConfig(num_blocks=60, dtype=cache),
        runtime=RuntimeConfig(device="cpu", overlap=overlap),
        speculation=drafted_by(folders["dense"]),
    )
    engine, heard = Engine(build_runner(config), config), Heard()
    assert {group.spec.dtype_bytes for group in engine.info.pool.groups} == ({1} if cache == "fp8" else {4})
    prompt = [9 + i % 50 for i in range(70)]
    for i in range(7):
        params = SamplingParams(max_tokens=41, temperature=0.8 * (i % 2), seed=i, top_p=0.9, ignore_eos=True)
        engine.submit(RequestInput(request_id=str(i), prompt_ids=[*prompt, i], params=params), heard)
    inflight = None
    while engine.loop.live:
        inflight = engine.loop.iterate(inflight)
    stats = engine.stats()
    assert stats.prefix_hit_tokens > 0
    assert stats.accepted_tokens == stats.draft_tokens > 7 * 25


def test_a_draft_model_may_be_rounded_where_the_model_is_not(folders: dict[str, Path]) -> None:
    """Its head too, but not its embedding, and nothing of the model that it drafts for."""
    speculation = replace(drafted_by(folders["draft"]), quantize="int8")
    got, stats = play(folders["dense"], 1, speculation)
    same(got, plain(folders["dense"], 1))
    assert stats.draft_tokens > 0
    config = EngineConfig(
        model=str(folders["dense"]),
        load_format="dummy",
        runtime=RuntimeConfig(device="cpu"),
        cache=CacheConfig(num_blocks=60),
        speculation=speculation,
    )
    runner = build_runner(config)
    assert runner._draft_model is not None
    rounded = {name: isinstance(weight.held, Rounded) for name, weight in runner._draft_model._decoder.weights.items()}
    assert not rounded.pop("embed.weight")
    assert all(rounded.values())
    assert not any(isinstance(weight.held, Rounded) for weight in runner._decoder.weights.values())


def test_a_draft_model_that_does_not_fit_is_refused_with_a_sentence(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    target.mkdir()
    draft.mkdir()
    write(target)

    def refused(sentence: str) -> None:
        config = EngineConfig(
            model=str(target),
            load_format="dummy",
            runtime=RuntimeConfig(device="cpu"),
            speculation=drafted_by(draft),
        )
        with pytest.raises(ConfigError, match=sentence):
            build_runner(config)

    write(draft, vocab_size=300)
    refused("another vocabulary")
    write(draft, max_position_embeddings=128)
    refused("lower max_model_len")
    (draft / "config.json").write_text(json.dumps(small(families.QWEN3_5, "Qwen3_5ForCausalLM")))
    refused("running state")
    write(draft)
    (draft / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}}}))
    refused("another vocabulary")
    for unreadable in (b"[", b'{"model": "\xff"}'):
        (target / "tokenizer.json").write_bytes(unreadable)
        refused("cannot be read")
    assert CONFIG["vocab_size"] == 320


def test_a_quantized_draft_model_is_not_rounded_again(tmp_path: Path) -> None:
    said = float_quantized("channel", strategy="token", dynamic=True)
    write(tmp_path, quantization_config={**said, "ignore": []}, tie_word_embeddings=True)
    config = EngineConfig(
        model=str(tmp_path),
        load_format="dummy",
        runtime=RuntimeConfig(device="cpu"),
        speculation=SpeculationConfig(method="draft", model=str(tmp_path), quantize="int4"),
    )
    with pytest.raises(ConfigError, match=r"speculation\.quantize = 'int4' is for 16-bit checkpoints"):
        build_runner(config)
