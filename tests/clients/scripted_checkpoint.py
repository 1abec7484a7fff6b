"""A checkpoint whose answers are known: the last character of the prompt chooses one of a few texts.

It is a real Qwen3 checkpoint that any engine of that family runs. Embeddings are one-hot, attention and MLP add
nothing, and the output matrix is a table "this token is followed by that one". Every piece of every text is a token
of its own, so a table is enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from engine.demo.make import TOKENIZER_CONFIG, config_json, tokenizer_json, vocabulary

HIDDEN = 512
END = "<|im_end|>"

SCRIPTS: dict[str, Sequence[str | bytes]] = {
    # one call, cut in awkward places
    "w": [
        "I look", ".\n<tool", '_call>\n{"na', 'me": "get_weather", "arg', 'uments": {"city": "Par', 'is", "days',
        '": 2}}\n</', "tool_call>",
    ],
    # two calls
    "p": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "get_time"', ', "arguments": {}}\n</tool_call>',
    ],
    # thinking, then an answer
    "t": ["<th", "ink>\nLet me ", "see.\n</thi", "nk>\n\nThe an", "swer."],
    # arguments of a forced call, and more than was asked for
    "{": ['"city": "Os', 'lo"}', "}\n</tool_call>", " and so on"],
    # a call in Llama 3's form
    "l": ['{"name": "get_', 'time", "parameters"', ': {"zone": "UTC"}}'],
    # the end of thinking that the template began
    "o": ["Hidden th", "ought</thi", "nk>\nShown."],
    # plain text, with a character that two tokens share
    "h": ["Hello", " there", ", 20", b" \xc2", b"\xb0C out."],
    # text that takes longer than a machine that does other things sends none
    "c": [f" {number}," for number in range(1, 97)],
}  # fmt: skip


def make(folder: Path, scripts: Mapping[str, Sequence[str | bytes]] = SCRIPTS) -> None:
    """Write the checkpoint. Raises ValueError when a piece occurs twice or there are too many of them."""
    folder.mkdir(parents=True)
    vocab = vocabulary([])
    follows: dict[int, int] = {}
    for character, pieces in scripts.items():
        last = vocab[_stand_in(character)]
        for piece in pieces:
            token = _stand_in(piece)
            if token in vocab:
                raise ValueError(f"{piece!r} is a token already: every piece must be one of its own")
            vocab[token] = len(vocab)
            follows[last] = last = vocab[token]
    if len(vocab) > HIDDEN:
        raise ValueError(f"{len(vocab)} tokens do not fit into {HIDDEN} dimensions")
    table = np.zeros((len(vocab), HIDDEN), np.float32)
    for token in range(len(vocab)):
        table[follows.get(token, vocab[END]), token] = 1.0
    _write(folder, vocab, table)


def _stand_in(text: str | bytes) -> str:
    """`text` as byte-level vocabularies write it."""
    data = text.encode() if isinstance(text, str) else text
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(b) if b in printable else chr(0x100 + others.index(b)) for b in data)


def _write(folder: Path, vocab: dict[str, int], table: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> None:
    size = len(vocab)
    config = config_json(size) | {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "tie_word_embeddings": False,
    }
    head = config["head_dim"]
    layer = "model.layers.0."
    embedding = np.zeros((size, HIDDEN), np.float32)
    embedding[np.arange(size), np.arange(size)] = 1.0
    weights = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": table,
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        layer + "input_layernorm.weight": np.ones(HIDDEN, np.float32),
        layer + "post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
        layer + "self_attn.q_proj.weight": np.zeros((2 * head, HIDDEN), np.float32),
        layer + "self_attn.k_proj.weight": np.zeros((head, HIDDEN), np.float32),
        layer + "self_attn.v_proj.weight": np.zeros((head, HIDDEN), np.float32),
        layer + "self_attn.o_proj.weight": np.zeros((HIDDEN, 2 * head), np.float32),
        layer + "self_attn.q_norm.weight": np.ones(head, np.float32),
        layer + "self_attn.k_norm.weight": np.ones(head, np.float32),
        layer + "mlp.gate_proj.weight": np.zeros((32, HIDDEN), np.float32),
        layer + "mlp.up_proj.weight": np.zeros((32, HIDDEN), np.float32),
        layer + "mlp.down_proj.weight": np.zeros((HIDDEN, 32), np.float32),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    # The template ends with the last message's text, so that its last character chooses the script.
    chat_template = (
        "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}"
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    )
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer_json(vocab, []),
        "tokenizer_config.json": TOKENIZER_CONFIG | {"chat_template": chat_template},
        "generation_config.json": {"eos_token_id": vocab[END]},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, ensure_ascii=False))
