"""What a model says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.serving.frontend.description import description, min_tokens, sampling
from engine.serving.frontend.settings import SettingsError, parse


def test_its_own_sampling_is_what_a_request_could_send(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert sampling(tmp_path) == {}
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 512, "do_sample": True}
    file.write_text(json.dumps({**values, "min_p": 7, "repetition_penalty": "1.1", "eos_token_id": 3}))
    assert sampling(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 512}
    file.write_text(json.dumps({"top_k": 10**30, "max_new_tokens": 2**64, "temperature": 0.6}))
    assert sampling(tmp_path) == {"temperature": 0.6}, "every request of a client who says nothing was refused"
    file.write_text("no JSON")
    assert sampling(tmp_path) == {}


def test_answers_are_no_shorter_than_the_checkpoint_wants(tmp_path: Path) -> None:
    assert min_tokens(tmp_path) == 0
    for value, least in ((3, 3), (2000, 2000), (None, 0), (-1, 0), (True, 0), ("2", 0)):
        (tmp_path / "generation_config.json").write_text(json.dumps({"min_new_tokens": value}))
        assert min_tokens(tmp_path) == least


def test_names_and_a_template_of_its_entry(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "own.jinja").write_text("[TOOL_CALLS]")
    parameters = {"model": "checkpoint", "chat_template": "own.jinja", "served_names": '["a/b", "c"]'}
    said = description(parse(parameters, tmp_path))
    assert said["template"]["calls"] == ("[TOOL_CALLS]",)
    assert said["served_names"] == ["a/b", "c"]
    with pytest.raises(SettingsError, match="there is no chat template"):
        parse({**parameters, "chat_template": "none.jinja"}, tmp_path)
    with pytest.raises(SettingsError, match="served_names"):
        parse({**parameters, "served_names": json.dumps(["x"] * 17)}, tmp_path)
