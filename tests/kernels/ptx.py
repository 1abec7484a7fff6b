"""Instructions of PTX on two 16-bit numbers in a register, carried out one by one: enough for texts that kernels have
inline. Of halves in braces there are two in a register."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

FULL = 0xFFFFFFFF
DTYPES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def execute(text: str, given: Mapping[int, int]) -> dict[int, int]:
    """What stands in operands $0, $1, … after a text, of registers that stand in $n before it."""
    held = {f"${place}": value for place, value in given.items()}
    whole = text.strip()
    for instruction in (whole[1:-1] if whole.startswith("{") else whole).split(";"):
        name, _, rest = instruction.strip().partition(" ")
        if not name or name == ".reg":
            continue
        to, *sources = (part.strip() for part in re.findall(r"\{.*?\}|[^,{}]+", rest) if part.strip())
        if to.startswith("{"):
            (value,) = (held[source] for source in sources)
            held |= {half: value >> 16 * place & 0xFFFF for place, half in enumerate(_halves(to))}
            continue
        if sources[0].startswith("{"):
            low, high = (held[half] for half in _halves(sources[0]))
            held[to] = high << 16 | low
            continue
        values = [held[source] if source in held else int(source, 0) for source in sources]
        held[to] = _whole(name, values) if name.endswith(".b32") or name == "shr.u32" else _numbers(name, values)
    return {int(place[1:]): value for place, value in held.items() if re.fullmatch(r"\$\d+", place)}


def _halves(braces: str) -> list[str]:
    return [half.strip() for half in braces[1:-1].split(",")]


def _whole(name: str, values: list[int]) -> int:
    does: dict[str, Callable[..., int]] = {
        "mov": lambda a: a,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "shr": lambda a, by: a >> by,
        "shl": lambda a, by: a << by & FULL,
        "prmt": _chosen,
        "lop3": _and_with,
    }
    return does[name.split(".")[0]](*values)


def _and_with(a: int, b: int, c: int, table: int) -> int:
    """a & b, or-ed with c or where they differ from it: tables as PTX writes them of 0xF0, 0xCC and 0xAA."""
    assert table in (0xEA, 0x6A)
    return a & b | c if table == 0xEA else a & b ^ c


def _chosen(a: int, b: int, selector: int) -> int:
    both = b << 32 | a
    return sum((both >> 8 * (selector >> 4 * place & 7) & 0xFF) << 8 * place for place in range(4))


def _numbers(name: str, values: list[int]) -> int:
    """In float64, which holds products of two 16-bit numbers, and rounded once."""
    dtype = DTYPES[name.split(".")[-1]]
    made = 0
    for shift in (0, 16):
        halves = [value >> shift & 0xFFFF for value in values]
        signed = torch.tensor([half - (half >> 15 << 16) for half in halves], dtype=torch.int16)
        a, b, *c = signed.view(dtype).double().tolist()
        exact = {"sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "fma": lambda a, b, c: a * b + c}
        number = torch.tensor(exact[name.split(".")[0]](a, b, *c), dtype=torch.float64)
        made |= (int(number.to(dtype).view(torch.int16)) & 0xFFFF) << shift
    return made
