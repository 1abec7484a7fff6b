"""A model's own module for further tokens drafts what its definition says, and changes no token."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import nn

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.models.reader import ConfigError
from engine.runner.build import build_runner
from engine.weights.checkpoint import WeightsError
from tests.gate import families
from tests.gate.oracle import BRANCH_ENDS, random_model
from tests.runner.proposals import Proposals, prompts, run
from tests.runner.test_drafts import ENTRIES, SEEDS, SPARSE, STATES, VOCAB, plain, play, same, small
from tests.runner.test_graphs import Recorder

LAYERS = 3
MTP = SpeculationConfig(method="mtp", tokens=3)


class Module:
    """A family's model with its module, which is one layer more of it and the parts that published ones have."""

    def __init__(self, name: str, own: bool = False, knows: bool = False) -> None:
        """own: an embedding and a head of the module's own. knows: the next token follows from the last alone, and the
        module says so."""
        self.name = name
        torch.manual_seed(3)
        self.model = _MODELS[name](knows)
        config = self.model.config
        config.num_hidden_layers = LAYERS  # transformers does without the last
        hidden, generator = config.hidden_size, torch.Generator().manual_seed(5)

        def norm() -> torch.Tensor:
            return _OFFSET[name] + (0.0 if knows else 0.2) * torch.randn(hidden, generator=generator)

        def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            return scale * torch.randn(rows, columns, generator=generator) * columns**-0.5

        self.project = matrix(hidden, 2 * hidden)
        if knows:
            self.project = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1)
        self.norms = {part: norm() for part in ("embedding", "hidden", "last")}
        self.embed, self.head = self.model.model.embed_tokens.weight.data, self.model.lm_head.weight.data
        if own:
            self.embed, self.head = matrix(VOCAB, hidden), matrix(VOCAB, hidden, 3.0)

    def write(self, folder: Path, without: tuple[str, ...] = ()) -> Path:
        """As the family's checkpoints are published."""
        self.model.config.num_hidden_layers = LAYERS + 1
        self.model.save_pretrained(folder)
        self.model.config.num_hidden_layers = LAYERS
        config = json.loads((folder / "config.json").read_text())
        held = {_published(self.name, name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
        held |= self.parts()
        kept = {name: tensor.clone() for name, tensor in held.items() if not name.startswith(without or ("nothing",))}
        save_file(kept, folder / "model.safetensors")
        said = {_COUNTS[self.name]: 1, "num_hidden_layers": LAYERS, "max_position_embeddings": 256, "eos_token_id": 7}
        if config.get("layer_types"):
            said["layer_types"] = config["layer_types"][:LAYERS]
        (folder / "config.json").write_text(json.dumps({**config, **said}))
        return folder

    def parts(self) -> dict[str, torch.Tensor]:
        """All but the layer, as published."""
        norms = (self.norms["embedding"], self.norms["hidden"], self.project, self.norms["last"])
        return dict(zip(_PARTS[self.name], (*norms, self.embed, self.head), strict=True))

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """The likeliest tokens behind `tokens`. Each draft is taken for granted by the next."""
        tokens = list(tokens)
        hidden = self._seen(torch.tensor([tokens[:-1]]))
        for _ in range(count):
            ids = torch.tensor(tokens[1:])
            out, said = self._ahead(self._norm(self.embed[ids], "embedding"), hidden, ids)
            tokens.append(int((self._norm(said[-1], "last") @ self.head.T).argmax()))
            hidden = torch.cat((hidden, out[-1:]))
        return tokens[-count:]

    def _seen(self, tokens: torch.Tensor) -> torch.Tensor:
        """What the module takes of the model, of each token."""
        hidden: torch.Tensor = self.model.model(tokens).last_hidden_state[0]
        return hidden

    def _ahead(
        self, embedded: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer makes of embeddings and hidden states, for the next and for the norm before the head."""
        inner = self.model.model
        x = (torch.cat((embedded, self._norm(hidden, "hidden")), dim=1) @ self.project.T)[None]
        places = torch.arange(x.shape[1])[None]
        out = inner.layers[LAYERS](
            x,
            position_embeddings=inner.rotary_emb(x, places),
            attention_mask=torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None],
            position_ids=places,
        )[0]
        return (self._norm(out, "last") if _PASSES_NORMED[self.name] else out), out

    def _norm(self, x: torch.Tensor, part: str) -> torch.Tensor:
        weight = self.norms[part] + 1 - _OFFSET[self.name]
        return x * (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * weight


class HyperModule(Module):
    """Of a model with several residual streams, all of which the module takes and gives."""

    def __init__(self, name: str, own: bool = False, knows: bool = False) -> None:
        super().__init__(name, own, knows)
        hidden, generator = self.model.config.hidden_size, torch.Generator().manual_seed(9)
        self.project, self.from_hidden = self.project.split(hidden, dim=1)
        head = self.model.model.hc_head
        self.hyper_head = {
            f"hc_{part}": torch.randn(getattr(head, f"hc_{part}").shape, generator=generator) * scale
            for part, scale in (("fn", 0.1), ("base", 1.0), ("scale", 1.0))
        }

    def parts(self) -> dict[str, torch.Tensor]:
        names = ("enorm", "hnorm", "e_proj", "h_proj", "norm", "emb.tok_emb", "head")
        norms = (self.norms["embedding"], self.norms["hidden"])
        held = (*norms, self.project, self.from_hidden, self.norms["last"], self.embed, self.head)
        made = {f"mtp.0.{name}.weight": tensor for name, tensor in zip(names, held, strict=True)}
        return made | {f"mtp.0.{name.replace('hc_', 'hc_head_')}": t for name, t in self.hyper_head.items()}

    def _seen(self, tokens: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hook = self.model.model.layers[LAYERS].register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
        self.model.model(tokens, use_cache=False)
        hook.remove()
        return seen[0]

    def _ahead(
        self, embedded: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inner, window = self.model.model, self.model.config.sliding_window
        x = (embedded @ self.project.T)[:, None] + self._norm(hidden, "hidden") @ self.from_hidden.T
        places = torch.arange(len(x))[None]
        hidden_places = torch.ones(len(x), len(x), dtype=torch.bool)
        hidden_places = hidden_places.triu(1) | hidden_places.tril(-window)
        out = inner.layers[LAYERS](
            x[None],
            position_embeddings={"main": inner.rotary_emb(x[None], places, "main")},
            attention_mask=torch.zeros(len(x), len(x)).masked_fill(hidden_places, float("-inf"))[None, None],
            position_ids=places,
            input_ids=ids[None],
        )[0]
        head = copy.deepcopy(inner.hc_head)
        for name, tensor in self.hyper_head.items():
            getattr(head, name).data.copy_(tensor)
        return out, head(out[None])[0]


@cache
def module(name: str, own: bool = False, knows: bool = False) -> Module:
    return (HyperModule if name == "deepseek-v4" else Module)(name, own, knows)


def _deepseek_v3(knows: bool) -> Any:
    config = {**families.DEEPSEEK_V3.config, "n_routed_experts": 8, "first_k_dense_replace": 1, **_SHORT}
    return _model("DeepseekV3", config, knows)


def _qwen3_5(knows: bool) -> Any:
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    narrow = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 64, "tie_word_embeddings": False}
    config = {**families.QWEN3_5.config, **_SHORT, "layer_types": kinds, **narrow}
    config["rope_parameters"] = {**config["rope_parameters"], "mrope_section": [3, 3, 2]}
    return _model("Qwen3_5Text", config, knows)


def _deepseek_v4(knows: bool) -> Any:
    ratios = {"compress_ratios": [0, 4, 128, 0], "num_hash_layers": 1}
    return _model("DeepseekV4", {**families.DEEPSEEK_V4.config, **_SHORT, **SPARSE, **ratios}, knows)


def _model(kind: str, config: dict[str, Any], knows: bool) -> Any:
    shape = families.Shape("small", kind, config, branch=0.3, router=1.0)
    model = random_model(shape).float()
    if knows:
        for name, parameter in model.named_parameters():
            if name.endswith(BRANCH_ENDS):
                nn.init.zeros_(parameter)
            if name == "model.norm.weight":
                nn.init.constant_(parameter, float(parameter.mean() > 0.5))
    return model


_SHORT = {"vocab_size": VOCAB, "max_position_embeddings": 256, "num_hidden_layers": LAYERS + 1}
_MODELS = {"deepseek-v3": _deepseek_v3, "qwen3.5": _qwen3_5, "deepseek-v4": _deepseek_v4}
_OFFSET = {"deepseek-v3": 1.0, "qwen3.5": 0.0, "deepseek-v4": 1.0}
_PASSES_NORMED = {"deepseek-v3": False, "qwen3.5": True}
_COUNTS = dict.fromkeys(("deepseek-v3", "deepseek-v4"), "num_nextn_predict_layers") | {
    "qwen3.5": "mtp_num_hidden_layers"
}
# Of the module's layer, the beginning of its tensors' names.
_LAYER = {"qwen3.5": "mtp.layers.0.", "deepseek-v4": "mtp.0."}
_AT = f"model.layers.{LAYERS}."
_PARTS = {
    "deepseek-v3": [
        f"{_AT}{part}.weight"
        for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
    ],
    "qwen3.5": [
        f"mtp.{part}.weight"
        for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "embed_tokens", "lm_head")
    ],
}


def _published(family: str, name: str) -> str:
    return name.replace(_AT, _LAYER.get(family, _AT))


def config_for(folder: Path, overlap: bool = True, tokens: int = 3, blocks: int = 14, rows: int = 3) -> EngineConfig:
    """blocks: of 16 tokens, or as many tokens in blocks of whole compressed entries."""
    whole = "compress_rates" in json.loads((folder / "config.json").read_text())
    return EngineConfig(
        model=str(folder),
        scheduler=SchedulerConfig(max_rows=rows, token_budget=40),
        cache=CacheConfig(num_blocks=max(4, blocks // 5), block_size=128) if whole else CacheConfig(num_blocks=blocks),
        runtime=RuntimeConfig(device="cpu", dtype="float32", overlap=overlap),
        speculation=SpeculationConfig(method="mtp", tokens=tokens),
    )


@pytest.mark.parametrize(
    ("family", "own", "padded"),
    [
        pytest.param(
            family,
            own,
            own,
            id=f"{family}-{'own-padded' if own else 'shared-eager'}",
            marks=() if own or family == "deepseek-v3" else pytest.mark.slow,
        )
        for family in _MODELS
        for own in (False, True)
    ],
)
def test_drafts_are_those_of_the_definition(tmp_path: Path, family: str, own: bool, padded: bool) -> None:
    """Behind prompts that came in chunks and were computed again."""
    made = module(family, own)
    settings = config_for(made.write(tmp_path))
    runner = build_runner(settings)
    if padded:
        runner.use_graphs(Recorder())
    assert runner._draft_head is not None
    assert (runner._draft_head._head.embed is not None) == own
    proposals = Proposals(runner._draft_head)
    engine = Engine(runner, settings)
    run(engine, prompts(6, temperature=0.0))
    assert (engine.stats().preemptions > 0) == (settings.cache.block_size == 16)
    assert len(proposals.seen) > 60
    for text, drafts in proposals.seen[::5]:
        with torch.no_grad():
            assert drafts == made.drafts(text, len(drafts))


@pytest.mark.parametrize(
    ("family", "overlap", "padded"),
    [
        pytest.param(family, both, both, marks=() if both or family == "deepseek-v3" else pytest.mark.slow)
        for family in _MODELS
        for both in (True, False)
    ],
)
def test_drafts_of_a_module_that_knows_stand(tmp_path: Path, family: str, overlap: bool, padded: bool) -> None:
    settings = config_for(module(family, knows=True).write(tmp_path), overlap, tokens=4, blocks=60, rows=6)
    asked = [*prompts(4, temperature=0.0), *prompts(4, 4, temperature=0.7, top_p=0.9)]
    bare = replace(settings, speculation=SpeculationConfig())
    plain, runner = build_runner(bare), build_runner(settings)
    if padded:
        runner.use_graphs(Recorder())
    engine = Engine(runner, settings)
    same(run(engine, asked), run(Engine(plain, bare), asked))
    stats = engine.stats()
    assert stats.accepted_tokens > 0.99 * stats.draft_tokens > 100


DUMMIES = {
    "deepseek-v3": {
        **small(families.DEEPSEEK_V3, "DeepseekV3ForCausalLM", first_k_dense_replace=1),
        "num_nextn_predict_layers": 1,
    },
    "qwen3.5": {**STATES, "mtp_num_hidden_layers": 1},
    "deepseek-v4": {**ENTRIES, "num_nextn_predict_layers": 1},
}


_SEEDS = {"qwen3.5": SEEDS["states"], "deepseek-v4": SEEDS["entries"]}


@pytest.mark.parametrize(
    ("family", "padded", "seed"),
    [
        pytest.param(family, padded, seed, marks=() if padded and seed == 2 else pytest.mark.slow)
        for family, seeds in ((family, _SEEDS.get(family, (1, 2))) for family in DUMMIES)
        for padded in (False, True)
        for seed in seeds
    ],
)
def test_a_module_changes_no_token(tmp_path: Path, family: str, padded: bool, seed: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DUMMIES[family]))
    got, stats = play(tmp_path, seed, MTP, capture=Recorder() if padded else None)
    same(got, plain(tmp_path, seed))
    assert stats.draft_tokens > 0


def test_a_model_without_the_module_is_refused_with_a_sentence(tmp_path: Path) -> None:
    def refused(folder: Path, sentence: str, error: type[Exception] = ConfigError) -> None:
        with pytest.raises(error, match=sentence):
            build_runner(config_for(folder))

    made = module("deepseek-v3")
    refused(made.write(tmp_path / "none", without=(_AT,)), rf"holds no tensor {_AT}\*")
    refused(made.write(tmp_path / "part", without=(f"{_AT}enorm",)), "missing: .*enorm", WeightsError)
    folder = made.write(tmp_path / "unsaid", without=(_AT,))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    refused(folder, "names none")
    dense, spark = tmp_path / "dense", tmp_path / "spark"
    transformers.LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"]).save_pretrained(dense)
    spark.mkdir()
    said = {**ENTRIES, "num_nextn_predict_layers": 3, "dspark_block_size": 7}
    (spark / "config.json").write_text(json.dumps(said))
    for folder in (dense, spark):
        with pytest.raises(ConfigError, match="names none"):
            build_runner(replace(config_for(folder), load_format="dummy"))
