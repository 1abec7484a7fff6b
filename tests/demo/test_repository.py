"""The repository that `make serve` serves is complete as it is checked out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.models import registry
from engine.text import ChatTemplate, Tokenizer

REPOSITORY = Path(__file__).parents[2] / "model_repository"


@pytest.mark.parametrize("name", ["demo", "tokenizer"])
def test_every_model_names_a_checkpoint_that_is_there(name: str) -> None:
    config = (REPOSITORY / name / "config.pbtxt").read_text()
    found = re.search(r'key: "model" value { string_value: "([^"]+)" }', config)
    assert found is not None
    assert (REPOSITORY / name / found[1]).resolve() == REPOSITORY / "demo" / "checkpoint"
    config, _ = registry.load(REPOSITORY / name / found[1])
    assert set(config.eos_ids) == {0, 2}
    assert Tokenizer.from_folder(REPOSITORY / name / found[1]).vocab_size == config.vocab_size


def test_the_draft_shares_the_tokenizer() -> None:
    folders = [REPOSITORY / "demo" / part for part in ("checkpoint", "draft")]
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    template = ChatTemplate.from_folder(folders[0])
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]).endswith("<|im_start|>assistant\n")
