"""Functions have at most 16 parameters; values bundle what goes together. Jitted kernels take what the GPU is told."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 16


def longer() -> Iterator[tuple[str, int]]:
    for folder in ("clients", "docker", "engine", "kernels", "model_repository", "perf", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                    continue
                given = node.args
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
                if count > MOST:
                    yield f"{path.relative_to(ROOT)} {node.name}", count


def test_no_function_has_more_than_sixteen_parameters() -> None:
    assert dict(longer()) == {}
