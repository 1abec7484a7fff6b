"""A GGUF file from `nereid add` to an answer, against transformers' model of the numbers that the file stands for."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from engine.serving.launch.cli import app
from tests import gguf_files
from tests.e2e.harness import Call, Server, text_of, tokens_of

TOKENS = 24
FORMATS = {"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K", "": "Q4_K"}
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}


def test_a_file_in_several_parts_is_added_and_answers(server: Server, models: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    written = gguf_files.write(
        tmp_path / "small.gguf",
        config,
        model.state_dict(),
        lambda name: next(kind for word, kind in FORMATS.items() if word in name),
        split=7,
    )
    assert written.file.name == "small-00001-of-00003.gguf"
    words = ["add", str(written.file), "--model-repository", str(models), "--set", "runtime.dtype=float32"]
    result = CliRunner().invoke(app, [*words, "--set", "cache.num_blocks=64", "--frontends", "1"])
    assert result.exit_code == 0, result.output
    assert "no chat template" not in result.output
    names = ("small", "small_tokenizer")
    for name in names:
        assert server.load(name) is None

    folder = models / "small" / "1" / "checkpoint"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "How do I open a file?"
    ids = tokenizer.encode(text).ids
    wanted = greedy(written.numbers, config, ids, tmp_path)
    asked = {"stream": True, "sampling_parameters": json.dumps({"temperature": 0.0, "ignore_eos": True})}
    answer = Call(server, "small", text_input=text, max_tokens=TOKENS, **asked).all()
    assert tokens_of(answer) == wanted
    assert text_of(answer) == tokenizer.decode(wanted)

    chat = json.dumps([{"role": "user", "content": text}])
    [rendered] = [part for part in Call(server, "small_tokenizer", messages=chat).all() if part]
    spoken = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert rendered["input_ids"] == tokenizer.encode(spoken).ids
    for name in reversed(names):
        server.unload(name)


def greedy(numbers: gguf_files.Tensors, config: dict[str, object], ids: list[int], folder: Path) -> list[int]:
    plain = folder / "plain"
    plain.mkdir(exist_ok=True)
    save_file(numbers, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))
    model = transformers.LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        made = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    return [int(token) for token in made[0, len(ids) :]]
