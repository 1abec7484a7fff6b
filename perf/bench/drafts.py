"""Drafts on a GPU with CUDA graphs: whether tokens stay the same, and what a drafted step costs over a plain one.

    python -m perf.bench.drafts [--model FOLDER] [--method mtp] [--drafts 4] [--rows 1 64] [--prompt-queries 33]

First small models of random weights, one of attention and one with running states too, answer the same requests
without drafts and with drafts that are right with probability 0.7, in batch-invariant bfloat16 and in float32,
overlapped and in turn, and all tokens are compared. Then steps of a model of the shape of Llama-3.1-8B, or of the one
in FOLDER, are timed with dummy weights; --method mtp has the model's own module make the drafts within them. Exits
with 1 when a token differs. --prompt-queries 33 takes attention to lines with drafts from the kernel for prompts to
that which splits keys.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from engine.api import Engine
from engine.config import CacheConfig, EngineConfig, RuntimeConfig, SchedulerConfig, SpeculationConfig
from engine.core.commit import InFlight
from engine.core.request import Drafter
from engine.types import RequestInput, SamplingParams, TokenEvent
from kernels.dispatch import Variant
from kernels.paged_attention.dispatch import LONGER, LongerProblem
from perf.simulate.step_costs import measure

VOCAB = 2048
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "eos_token_id": 7,
    "torch_dtype": "bfloat16",
}

STATES = {
    **SMALL,
    "architectures": ["Qwen3_5ForCausalLM"],
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
}

WIDE = {
    **SMALL,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}


class Answers:
    """Knows what requests gave without drafts, and says it with probability 0.7."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers
        self._random = random.Random(5)

    def propose(self, tokens: array[int], count: int) -> Sequence[int]:
        for prompt, answer in self._answers.items():
            given = tokens[len(prompt) :].tolist()
            if tuple(tokens[: len(prompt)]) == prompt and answer[: len(given)] == given:
                following = answer[len(given) : len(given) + count]
                return [token if self._random.random() < 0.7 else (token + 1) % VOCAB for token in following]
        return ()

    def close(self, given: Sequence[int]) -> None:
        """It knew them."""


class Heard:
    """A sink: the tokens of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}

    def deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.error is not None:
                raise RuntimeError(event.error)
            self.tokens.setdefault(event.request_id, []).extend(event.token_ids)


def asked(count: int) -> list[RequestInput]:
    draw, made = random.Random(1), []
    for i in range(count):
        extras = draw.choice(({}, {"top_k": 20, "top_p": 0.9}, {"logprobs": 2}, {"repetition_penalty": 1.2}))
        params = SamplingParams(
            max_tokens=draw.randint(20, 90), temperature=draw.choice((0.0, 0.8)), seed=i, ignore_eos=True, **extras
        )
        prompt = [draw.randrange(8, VOCAB) for _ in range(draw.randint(1, 200))]
        made.append(RequestInput(request_id=str(i), prompt_ids=prompt, params=params))
    return made


def play(config: EngineConfig, drafter: Callable[[], Drafter] | None) -> tuple[dict[str, list[int]], int, float]:
    """All requests of `asked` through an engine: their tokens, its steps, and the part of the drafts that stood."""
    from engine.runner.build import build_runner

    runner, heard = build_runner(config), Heard()
    engine = Engine(runner, config, drafter=drafter, draft_tokens=config.speculation.most)
    draw, waiting = random.Random(2), asked(40)
    inflight: InFlight | None = None
    steps = 0
    while waiting or engine.loop.live or inflight is not None:
        while waiting and draw.random() < 0.3:
            engine.submit(waiting.pop(), heard)
        inflight = engine.loop.iterate(inflight)
        steps += 1
    stats = engine.stats()
    runner.close()
    return heard.tokens, steps, stats.accepted_tokens / max(stats.draft_tokens, 1)


def same_tokens(folder: Path, shape: dict[str, Any], drafts: int, device: str) -> bool:
    """Whether answers with drafts are those without; prints what was played."""
    (folder / "config.json").write_text(json.dumps(shape))
    good = True
    for dtype, overlap in (("bfloat16", True), ("float32", True), ("float32", False)):
        found: list[tuple[dict[str, list[int]], int, float]] = []
        for method in ("none", "ngram"):
            speculation = SpeculationConfig() if method == "none" else SpeculationConfig(method=method, tokens=drafts)
            config = EngineConfig(
                model=str(folder),
                load_format="dummy",
                scheduler=SchedulerConfig(max_rows=16, token_budget=512),
                cache=CacheConfig(num_blocks=600),
                runtime=RuntimeConfig(
                    device=device,  # type: ignore[arg-type]
                    dtype=dtype,  # type: ignore[arg-type]
                    deterministic=dtype == "bfloat16",
                    overlap=overlap,
                    compile_ahead="off",
                ),
                speculation=speculation,
            )
            plain = found[0][0] if found else {}
            answers = {tuple(input.prompt_ids): plain.get(input.request_id, []) for input in asked(40)}
            found.append(play(config, None if method == "none" else partial(Answers, answers)))
        (want, before, _), (got, after, stood) = found
        differ = [name for name in want if want[name] != got[name]]
        print(
            f"{shape['architectures'][0]}, {dtype}, overlap {overlap}: {before} steps, with drafts {after}, "
            f"{stood:.2f} of them stood, {len(want)} answers, {len(differ)} differ",
            flush=True,
        )
        good &= not differ
    return good


def time_steps(model: str, rows: list[int], method: str, drafts: int, context: int) -> None:
    """Print what drafted steps cost over plain ones."""
    from engine.runner.build import build_runner

    config = EngineConfig(
        model=model,
        load_format="dummy",
        scheduler=SchedulerConfig(max_rows=max(rows)),
        speculation=SpeculationConfig(method=method, tokens=drafts),
    )
    runner = build_runner(config)
    limits = (config.scheduler.max_rows, config.scheduler.token_budget)
    costs = measure(runner, *limits, context, 1024, rows, [0], sorted({0, 1, drafts}))
    plain = {cost.rows: cost.step_ms for cost in costs if not cost.drafts}
    for cost in costs:
        ratio = cost.step_ms / plain[cost.rows]
        print(f"{cost.rows} rows, 1 + {cost.drafts}: {cost.step_ms:.3f} ms, {ratio:.3f} of a plain step", flush=True)
    runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a dense model's config.json")
    parser.add_argument("--method", choices=("ngram", "mtp"), default="ngram", help="of the steps that are timed")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--context", type=int, default=1088)
    parser.add_argument("--skip-small", action="store_true", help="compare no tokens")
    parser.add_argument("--skip-wide", action="store_true", help="time no steps")
    parser.add_argument("--prompt-queries", type=int, help="queries a sequence for the kernel for prompts")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    good = True
    with ExitStack() as stack:
        if args.prompt_queries is not None:
            for variant in LONGER.variants:
                if "prompt" in variant.name:
                    declines = partial(declines_below, variant, args.prompt_queries)
                    stack.enter_context(LONGER.changed(variant.name, declines=declines))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not args.skip_small:
            for shape in (SMALL, STATES):
                good &= same_tokens(folder, shape, args.drafts, args.device)
        if not args.skip_wide:
            (folder / "config.json").write_text(json.dumps(WIDE))
            time_steps(args.model or str(folder), args.rows, args.method, args.drafts, args.context)
    sys.exit(not good)


def declines_below(variant: Variant[LongerProblem], queries: int, problem: LongerProblem) -> str | None:
    """The variant's own reason, or that no sequence has so many queries."""
    return f"for sequences of {queries} queries" if problem.queries < queries else variant.declines(problem)


if __name__ == "__main__":
    main()
