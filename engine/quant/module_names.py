"""Modules that a checkpoint's config lists: by name, with their parts, or by patterns as file names are matched."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from engine.quant import patterns

_GLOB = re.compile(r"\*+|\?|\[(?:!(?:\][^\]]*|[^\]]+)|\][^\]]*|[^\]!][^\]]*)\]|.", re.DOTALL)
_MAGIC = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """names are looked up, so that it takes no longer when they are many; each of `expressions` is tried.

    steps: the most that `hold` takes for a module. with_parts: what a name stands for holds the modules in it too.
    """

    names: frozenset[str] = frozenset()
    expressions: tuple[str, ...] = ()
    steps: int = 1
    with_parts: bool = False

    def hold(self, module: str) -> bool:
        return self.name(module) or any(patterns.begins(expression, module) for expression in self.expressions)

    def name(self, module: str) -> bool:
        """Whether it is listed by its name."""
        if not self.with_parts:
            return module in self.names
        ends = [*(place for place, character in enumerate(module) if character == "."), len(module)]
        return any(module[:end] in self.names for end in ends)


NOTHING = ModuleNames()


def listed(
    where: str, names: Iterable[str] = (), expressions: Iterable[str] = (), with_parts: bool = False
) -> ModuleNames:
    """Raises ConfigError for expressions that are not read, or take too many steps."""
    tried = tuple(dict.fromkeys(expressions))
    return ModuleNames(frozenset(names), tried, 1 + patterns.check(where, tried), with_parts)


def globs(where: str, words: Iterable[str], with_parts: bool = False) -> ModuleNames:
    """Words that match a whole name as file names are matched (`fnmatch`). Raises ConfigError as `listed` does."""
    names = {word for word in words if not _MAGIC & set(word)}
    end = r"(?:\..*)?$" if with_parts else "$"
    return listed(where, names, (as_expression(word) + end for word in words if word not in names), with_parts)


def as_expression(glob: str) -> str:
    """The regular expression of what a pattern of file names matches, without its end."""
    return _GLOB.sub(lambda found: _part(found[0]), glob)


def _part(part: str) -> str:
    if part[0] == "*":
        return ".*"
    if part == "?":
        return "."
    if part[0] == "[" and len(part) > 1:
        negated = part[1] == "!"
        among = part[1 + negated : -1].replace("\\", "\\\\").replace("[", "\\[")
        first = "\\" + among if among[0] in "^]" else among
        return f"[{'^' * negated}{first}]"
    return re.escape(part)
