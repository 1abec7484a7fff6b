from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from engine.demo.make import learn_merges, make, weights
from engine.models import registry
from engine.text import ChatTemplate, Tokenizer

DIGEST = "5bb518bcbcba9fda4f24c5b252cec03cbd226079eb50638d5a52351e2dfb37db"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make(folder)
    return folder


def test_every_machine_makes_the_same_bytes(checkpoint: Path) -> None:
    digest = hashlib.sha256()
    for file in sorted(checkpoint.iterdir()):
        digest.update(file.name.encode() + file.read_bytes())
    assert digest.hexdigest() == DIGEST


def test_transformers_reads_it(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint))
    assert model.num_parameters() == 1_820_608
    theirs = transformers.AutoTokenizer.from_pretrained(str(checkpoint))
    text = "The people who were reading: 12 wörds, 你好 🙂\n\n  and <|im_end|> x"
    ours = Tokenizer.from_folder(checkpoint)
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert set(registry.load(checkpoint)[0].eos_ids) == {0, 2}
    chat = [{"role": "user", "content": "Hello"}]
    template = ChatTemplate.from_folder(checkpoint)
    assert template is not None
    assert template.render(chat) == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    shown = template.render(chat, tools=tools)
    assert shown == theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '{"name": "f"}' in shown
    assert '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>' in shown


def test_its_distributions_are_not_flat(checkpoint: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(str(checkpoint))
    with torch.no_grad():
        logits = model(torch.arange(3, 203)[None]).logits[0]
    assert logits.std(dim=-1).min() > 0.7


def test_the_seed_changes_the_weights() -> None:
    a, b = weights(8, 0), weights(8, 1)
    assert a.keys() == b.keys()
    assert not any(np.array_equal(a[name], b[name]) for name in a)


def test_merges_come_by_frequency_then_by_name() -> None:
    assert learn_merges("ab ab cd", 2) == [("a", "b"), ("Ġ", "ab")]
    with pytest.raises(ValueError, match="only 1 merges"):
        learn_merges("a", 2)
