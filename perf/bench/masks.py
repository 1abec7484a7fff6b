"""What constrained rows cost the host a step, without a model: their masks, and following their tokens.

    python -m perf.bench.masks --tokenizer FOLDER [--rows 1,8,64] [--steps 100]

Each row keeps to a schema of its own and goes on with any token that it allows. What takes the loop's thread while the
GPU computes is `masks` and `advance`; their sum has to stay below the decoder's time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np

from engine.structured.vocabulary import Vocabulary
from engine.text import Tokenizer
from engine.types import Constraint
from perf.workload import schema


def measure(vocabulary: Vocabulary, rows: int, steps: int, seed: int = 0) -> tuple[list[float], list[float]]:
    """Seconds that each step's masks took, and following its tokens."""
    draw = np.random.default_rng(seed)
    constraints = [Constraint(kind="json", text=json.dumps(schema(number))) for number in range(rows)]
    matchers = [vocabulary.begun(vocabulary.compiled(of), 0, ()) for of in constraints]
    masks_s, advance_s = [], []
    for _ in range(steps):
        began = time.perf_counter()
        masks = vocabulary.masks(matchers)
        masks_s.append(time.perf_counter() - began)
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        tokens = [int(draw.choice(np.flatnonzero(allowed))) for allowed in bits]
        began = time.perf_counter()
        for matcher, token in zip(matchers, tokens, strict=True):
            matcher.advance(token)
        advance_s.append(time.perf_counter() - began)
    broken = [matcher.error for matcher in matchers if matcher.error is not None]
    if broken:
        raise RuntimeError(broken[0])
    return masks_s, advance_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a checkpoint's tokenizer")
    parser.add_argument("--eos", type=int, default=1, help="id that ends an answer")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    size = Tokenizer.from_folder(arguments.tokenizer).vocab_size
    vocabulary = Vocabulary(arguments.tokenizer, size, (arguments.eos,))
    for rows in map(int, arguments.rows.split(",")):
        times = measure(vocabulary, rows, arguments.steps)
        told = (
            f"{name} {statistics.median(of) * 1e3:7.3f} ms (p99 {sorted(of)[-1 - len(of) // 100] * 1e3:.3f})"
            for name, of in zip(("masks", "advance"), times, strict=True)
        )
        print(f"{rows:4d} rows: {', '.join(told)}")


if __name__ == "__main__":
    main()
