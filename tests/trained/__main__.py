"""`make test-trained`: a trained model, fetched as `nereid pull` does, against transformers; and what each way to hold
its weights and its cache costs.

    python -m tests.trained [--accept-licence] [--write docs/correctness.md]

Exit status 1 when a log-probability is further than LIMIT from that of transformers, or a greedy token another.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import quants
from safetensors.torch import save_file
from tokenizers import Tokenizer

from clients.python import pull
from engine import env
from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, WeightsConfig
from engine.runner.build import build_runner
from engine.serving.launch import gguf_folder
from engine.types import RequestInput, SamplingParams

LIMIT = 1e-3
WINDOW, WINDOWS, GREEDY = 500, 3, 32
PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Once upon a time, there was")
_BEGIN, _END = "<!-- make test-trained: begin -->\n", "<!-- make test-trained: end -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept-licence", action="store_true", help="agree to the licence of Gemma 3")
    parser.add_argument("--write", type=Path, help="the page to put the figures into")
    options = parser.parse_args()
    try:
        file = pull.pull(pull.GEMMA, env.read().cache_dir, options.accept_licence, print)
    except pull.PullError as error:
        print(error, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="nereid-trained-") as made:
        packed, plain = Path(made) / "packed", Path(made) / "plain"
        packed.mkdir()
        plain.mkdir()
        gguf_folder.write(file, packed)
        write_plain(file, packed, plain)
        tokenizer = Tokenizer.from_file(str(packed / "tokenizer.json"))
        # Python's own text, which differs a little between its versions.
        ids = tokenizer.encode(inspect.getsource(argparse) + inspect.getsource(textwrap), add_special_tokens=False).ids
        begin = tokenizer.token_to_id("<bos>")
        windows = [[begin, *ids[at : at + WINDOW - 1]] for at in range(0, WINDOWS * (WINDOW - 1), WINDOW - 1)]
        prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
        wanted, answers = of_transformers(plain, windows, prompts)
        worst, told = 0.0, [("transformers, float32", perplexity(wanted), 0.0)]
        for way, folder, settings in ways(packed, plain):
            with engine(folder, settings) as running:
                heard = logprobs_of(running, windows)
                apart = float(np.abs(heard - wanted).max())
                told.append((way, perplexity(heard), float(np.abs(heard - wanted).mean())))
                if settings == {}:
                    worst = apart
                    said = [result.token_ids for result in running.generate(asked(prompts, max_tokens=GREEDY))]
            print(f"{way}: perplexity {told[-1][1]:.3f}, largest difference {apart:.1e}, mean {told[-1][2]:.1e}")
    same = said == answers
    print(f"largest difference as it is {worst:.1e} (limit {LIMIT:.0e}); greedy tokens {'equal' if same else 'differ'}")
    passed = worst <= LIMIT and same
    if options.write and passed:
        write_page(options.write, told, worst, len(wanted))
    return 0 if passed else 1


def ways(packed: Path, plain: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """What a row is called, the folder and the settings that are not the usual ones."""
    yield "Q4_K_M blocks, as the file has them", packed, {}
    yield "the same, 8-bit cache", packed, {"cache": "fp8"}
    for kind in ("fp8", "int8", "int4"):
        yield f"their numbers, `weights.quantize: {kind}`", plain, {"quantize": kind}


@contextmanager
def engine(folder: Path, settings: dict[str, Any]) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(folder),
        max_model_len=1024,
        scheduler=SchedulerConfig(max_rows=4, token_budget=512),
        cache=CacheConfig(block_size=16, num_blocks=160, dtype=settings.get("cache", "16bit")),
        runtime=RuntimeConfig(dtype="float32", device="cpu"),
        weights=WeightsConfig(quantize=settings.get("quantize")),
    )
    running = Engine(build_runner(config), config).start()
    try:
        yield running
    finally:
        running.close()


def asked(prompts: list[list[int]], **params: Any) -> list[RequestInput]:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, **params)
    return [RequestInput(request_id=f"r{i}", prompt_ids=ids, params=sampling) for i, ids in enumerate(prompts)]


def logprobs_of(running: Engine, windows: list[list[int]]) -> np.ndarray:
    """Of every token of the windows but the first ones."""
    heard: list[float] = []
    for result in running.generate(asked(windows, max_tokens=1, prompt_logprobs=0)):
        assert result.prompt_logprobs is not None, result.error
        heard += [entry.logprobs[0] for entry in result.prompt_logprobs if entry is not None]
    return np.array(heard)


def of_transformers(
    plain: Path, windows: list[list[int]], prompts: list[list[int]]
) -> tuple[np.ndarray, list[list[int]]]:
    model = transformers.Gemma3ForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    made, answers = [], []
    with torch.inference_mode():
        for window in windows:
            logits = model(torch.tensor([window])).logits[0, :-1]
            chosen = logits.gather(1, torch.tensor(window[1:])[:, None])[:, 0]
            made.append((chosen - logits.logsumexp(-1)).numpy())
        for ids in prompts:
            whole = model.generate(torch.tensor([ids]), max_new_tokens=GREEDY, do_sample=False, eos_token_id=None)
            answers.append([int(token) for token in whole[0, len(ids) :]])
    return np.concatenate(made), answers


def write_plain(file: Path, packed: Path, plain: Path) -> None:
    """A checkpoint of the file's numbers, by the gguf package."""
    config = json.loads((packed / "config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config["num_hidden_layers"])
    inner = ("self_attn.{}_proj", "self_attn.{}_norm", "mlp.{}_proj", "{}_layernorm")
    parts = ("q", "k", "v", "o", "gate", "up", "down", "input", "post_attention", "pre_feedforward", "post_feedforward")
    known = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(config["num_hidden_layers"]):
        for module in (f"model.layers.{layer}.{each.format(part)}" for each in inner for part in parts):
            found = names.get_name(module)
            if found is not None:
                known[found] = module
    tensors = {}
    for tensor in gguf.GGUFReader(str(file)).tensors:
        held = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
        name = known[tensor.name.removesuffix(".weight")]
        tensors[f"{name}.weight"] = held - 1 if name.endswith("norm") else held
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text(json.dumps(config))


def perplexity(logprobs: np.ndarray) -> float:
    return math.exp(-float(logprobs.mean()))


def write_page(page: Path, told: list[tuple[str, float, float]], worst: float, count: int) -> None:
    text = page.read_text()
    before, rest = text.split(_BEGIN)
    rows = [f"| {way} | {value:.3f} | {mean:.1e} |\n" for way, value, mean in told]
    table = "| held as | perplexity | mean difference |\n|---|---|---|\n" + "".join(rows)
    version = ".".join(map(str, sys.version_info[:3]))
    said = (
        f"{count:,} tokens of the source of argparse and textwrap (Python {version}), float32 on a CPU. As the file "
        f"is: largest difference {worst:.1e}, greedy tokens equal.\n\n"
    )
    page.write_text(before + _BEGIN + said + table + _END + rest.split(_END)[1])


if __name__ == "__main__":
    sys.exit(main())
