"""The gate through the real server: the same positions, asked for over gRPC streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from engine.serving.launch import repository
from engine.types import TokenLogprobs
from tests.e2e.harness import Call, Server
from tests.gate.conftest import Record, as_param
from tests.gate.families import FAMILIES
from tests.gate.oracle import FORCED, Golden, Sequence
from tests.gate.shapes import SHAPES, VOCAB, Shape
from tests.gate.verdict import NUM_LOGPROBS, judge

STREAMS = 16


@pytest.fixture
def server(shape: Shape, truth: Golden, device: str, dtype: str, tmp_path: Path) -> Iterator[Server]:
    """A tritonserver that serves the shape's checkpoint as `golden`, with a tokenizer of one word a token."""
    models = tmp_path / "models"
    words = Tokenizer(WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "model": str(truth.folder),
        "tokenizer": str(tmp_path),
        "max_model_len": "512",
        "scheduler.max_rows": str(STREAMS),
        "cache.block_size": str(shape.block_size),
        "runtime.device": device,
        "runtime.dtype": dtype,
    }
    repository.write_llm(models, "golden", settings)
    running = Server(models, tmp_path / "log", models=("golden",), exit_timeout_s=3)
    try:
        yield running.wait_ready()
    finally:
        running.stop()


# A server knows nothing of dense shapes, so one of them is enough; families differ in the state that it holds for them.
@pytest.mark.parametrize("shape", [as_param(shape) for shape in (SHAPES[0], *FAMILIES)], indirect=True)
def test_over_grpc(server: Server, shape: Shape, truth: Golden, dtype: str, record: Record) -> None:
    with ThreadPoolExecutor(STREAMS) as pool:
        played = list(pool.map(lambda sequence: play(server, sequence), truth.sequences))
    verdict = record(judge(truth.sequences, played, dtype))
    assert verdict.positions == len(truth.sequences) * (FORCED + 1)
    assert verdict.passes(dtype), verdict


def play(server: Server, sequence: Sequence) -> list[TokenLogprobs]:
    """FORCED + 1 positions. Off the forced path, the rest is asked for with the forced tokens in the prompt."""
    heard: list[TokenLogprobs] = []
    while len(heard) <= FORCED:
        done = len(heard)
        tokens, entries = ask(server, sequence.prompt + sequence.forced[:done], FORCED + 1 - done)
        same = [a == b for a, b in zip(tokens, sequence.forced[done:], strict=False)]
        heard += entries[: same.index(False) + 1 if False in same else None]
    return heard


def ask(server: Server, prompt: Seq[int], count: int) -> tuple[list[int], list[TokenLogprobs]]:
    """`count` greedy tokens after a prompt, and what the server says of them."""
    wanted = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True, "logprobs": NUM_LOGPROBS}
    call = Call(
        server,
        "golden",
        input_ids=list(prompt),
        stream=True,
        sampling_parameters=json.dumps(wanted),
        return_logprobs=True,
    )
    tokens: list[int] = []
    entries: list[TokenLogprobs] = []
    for response in call:
        if response:
            tokens += response["token_ids"]
            entries += [entry_of(said) for said in json.loads(response["logprobs"][0])]
    assert len(tokens) == len(entries) == count
    for token, entry in zip(tokens, entries, strict=True):
        assert entry.ids[1] == token
    return tokens, entries


def entry_of(said: dict[str, dict[str, float]]) -> TokenLogprobs:
    """The chosen token, which is the likeliest, then all by falling probability."""
    ids = sorted(map(int, said), key=lambda i: said[str(i)]["rank"])
    ids = [ids[0], *ids]
    return TokenLogprobs(ids, [said[str(i)]["logprob"] for i in ids], [int(said[str(i)]["rank"]) for i in ids])
