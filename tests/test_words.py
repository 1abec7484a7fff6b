"""Identifiers are the field's words: those that CONTRIBUTING's glossary replaced do not come back.

A word is refused where it had another meaning; elsewhere (a line of text, a share of requests) it is free.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

# One process reads the files, once.
pytestmark = pytest.mark.xdist_group("words")

ROOT = Path(__file__).parents[1]
EVERYWHERE = ("engine", "kernels", "clients", "perf", "tests")
STEPS = ("engine/core", "engine/runner", "engine/sampling", "engine/layers", "engine/models/decoder.py", "tests/core")
KERNELS = ("kernels", "tests/kernels")


@dataclass(frozen=True)
class Replaced:
    """Words of identifiers, as parts of a name or (`whole`) as all of it, by what took their place in the glossary.
    where: folders and files; what begins with "!" is left out."""

    words: str
    by: str
    where: tuple[str, ...]
    whole: bool = False

    def __str__(self) -> str:
        return self.words.split()[0]

    def refuses(self, name: str) -> bool:
        words = set(self.words.split())
        return name.strip("_").lower() in words if self.whole else not words.isdisjoint(parts(name))


REPLACED = (
    Replaced("pace paced", "PrefillPolicy", ("engine", "tests/core")),
    Replaced("crowd", "backlog_threshold", EVERYWHERE),
    Replaced("even", "wave_aligned_tokens", ("engine/core", "engine/runner"), whole=True),
    Replaced("cadence ahead", "launch_margin_s", ("engine/core/launch_timer.py", "engine/core/loop.py")),
    Replaced("hold late_launch", "delay_launch", ("engine/core", "engine/runner"), whole=True),
    Replaced("settle settles", "insert_prefix_blocks", ("engine/core", "engine/cache"), whole=True),
    Replaced("line lines", "entry", (*STEPS, "tests/runner")),
    # Beside ops there are lines of text.
    Replaced("line lines", "seq", (*KERNELS, "!kernels/compile_all", "!kernels/table.py")),
    Replaced("ends kept", "LastTokens", ("engine/layers", "engine/models/decoder.py", "engine/runner"), whole=True),
    Replaced("then", "forward_with_next_norm", ("engine/layers",), whole=True),
    Replaced("after", "next_norm", ("engine/layers",), whole=True),
    Replaced("wish wishes wishing", "SamplingExtras", EVERYWHERE),
    Replaced("silent", "first_event_pending", ("engine/core",)),
    Replaced("reach", "covered_tokens", ("engine/core", "engine/cache"), whole=True),
    Replaced("build", "BuildContext", ("engine/layers/build_context.py",), whole=True),
    Replaced("rehearsal rehearsals rehearse", "WarmupStep", EVERYWHERE),
    Replaced("fed", "warp_specialized", KERNELS),
    Replaced("broad", "gated_persistent", KERNELS),
    Replaced("stretch stretches", "stream_k", KERNELS),
    Replaced(
        "shares parts", "partial", ("kernels/linear", "kernels/paged_attention", "kernels/sparse_attention"), True
    ),
    Replaced("shares parts", "partial", ("kernels/latent_attention", "kernels/moe_route", "kernels/rms_norm"), True),
    Replaced("share", "split", ("kernels",), whole=True),
    Replaced("join joined", "combine", ("kernels",), whole=True),
    Replaced("border borders", "threshold", KERNELS),
    Replaced("widen widens", "upcast", KERNELS),
    Replaced("eight", "w8a8", ("engine", "kernels")),
    Replaced("chosen_products", "tuned GEMM", ("engine", "kernels"), whole=True),
    Replaced("give_back", "trim_malloc", ("engine",), whole=True),
    Replaced("share narrowed sliced", "Shard", ("engine/parallel", "engine/runner"), whole=True),
    Replaced("most least", "MAX_", EVERYWHERE),
    Replaced("stood", "accepted", ("engine/core", "engine/runner", "tests/core")),
    Replaced("ahead", "MTP", ("engine/models",)),
    Replaced("meeting", "Rendezvous", ("engine/parallel", "tests/parallel")),
    Replaced("settle", "advance_states", ("engine/runner",), whole=True),
    # Several files had each of these, for things of their own.
    Replaced("tile_for rows_moe few_tokens many_tokens", "threshold", EVERYWHERE, whole=True),
)
# Former names of settings, which are taken for one version; lines of a cache.
ALLOWED = {"late_launch", "chosen_products", "cache_line", "cache_lines", "CACHE_LINES"}


def parts(name: str) -> list[str]:
    """Words of a snake_case or CamelCase name, in lower case."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def defined(tree: ast.AST) -> Iterator[str]:
    """Names that a module gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@cache
def defined_in(file: Path) -> frozenset[str]:
    return frozenset(defined(ast.parse(file.read_text(encoding="utf-8")))) - ALLOWED


def names(where: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(file, name) of what is defined there, and of the files themselves."""
    free = tuple(place[1:] for place in where if place.startswith("!"))
    for folder in where:
        for file in sorted((ROOT / folder).rglob("*.py")) if (ROOT / folder).is_dir() else [ROOT / folder]:
            place = str(file.relative_to(ROOT))
            if folder.startswith("!") or place.startswith(free or ("!",)):
                continue
            yield place, file.stem
            yield from ((place, name) for name in defined_in(file))


@pytest.mark.parametrize("replaced", REPLACED, ids=str)
def test_a_word_that_was_replaced_does_not_come_back(replaced: Replaced) -> None:
    limit = str(replaced) == "most"  # MOST_ROWS was a limit; most_common() is English
    found = {
        f"{place}: {name}"
        for place, name in names(replaced.where)
        if replaced.refuses(name) and (not limit or (name.isupper() and "_" in name.strip("_")))
    }
    assert not found, f"the glossary of CONTRIBUTING.md says {replaced.by}"


@pytest.mark.parametrize("replaced", REPLACED, ids=str)
def test_the_glossary_has_the_word_that_took_its_place(replaced: Replaced) -> None:
    glossary = (ROOT / "CONTRIBUTING.md").read_text().partition("## Names")[2].partition("## Tests")[0]
    assert replaced.by.lower() in glossary.lower()


def test_old_words_are_seen_as_parts_and_as_wholes() -> None:
    code = "class LineEnds:\n    def settle(self, crowd_per_row): self._hold = (lines := 1)\n"
    found = list(defined(ast.parse(code)))
    assert found.count("settle") == 1
    refused = {name for name in found for replaced in REPLACED if replaced.refuses(name)}
    assert refused == {"LineEnds", "settle", "crowd_per_row", "_hold", "lines"}
