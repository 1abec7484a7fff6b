"""Random blocks in the formats of GGUF files."""

from __future__ import annotations

import torch

from kernels.weight.gguf import FORMATS

# Bytes at which a block holds 16-bit floats, which random bytes would make infinite or NaN.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def blocks(name: str, rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Random rows of `count` blocks: every bit pattern of numbers and of groups' scales, scales of about 0.01."""
    generator = torch.Generator().manual_seed(seed)
    if name in PLAIN:
        return torch.randn(rows, count, generator=generator).to(PLAIN[name]).view(torch.uint8)
    size = FORMATS[name].num_bytes
    made = torch.randint(0, 256, (rows, count, size), dtype=torch.uint8, generator=generator)
    for at in SCALES[name]:
        scale = 0.01 * torch.randn(rows, count, 1, generator=generator)
        made[..., at : at + 2] = scale.half().view(torch.uint8)
    return made.flatten(1)
