"""Imports run one way, and the control side has no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Values that cross boundaries; any part may import them.
CONTRACTS = {
    "engine.types",
    "engine.config",
    "engine.env",
    "engine.files",
    "engine.gguf_file",
    "engine.heap",
    "engine.interpreter",
    "engine.plain",
    "engine.signals",
    "engine.terminal",
    "engine.watcher",
    "engine.core.plan",
    "engine.cache.spec",
    "engine.cache.writes",
    "engine.cache.tensors",
    "engine.models.config",
    "engine.models.reader",
    "engine.runner.batch",
    "kernels.batch",
    "kernels.tuned.tables",
}
# What a part may import besides itself and the contracts; "engine" and "clients" mean all of it.
MAY_IMPORT = {
    "kernels": {"kernels.compilation"},
    "kernels.compilation": {"kernels"},
    "engine.layers": {"kernels", "engine.quant", "engine.parallel"},
    "engine.parallel": {
        "kernels",
        "kernels.compilation",
        "engine.weights",
        "engine.runner",
    },  # the runner in a rank's start alone
    "engine.weights": set(),
    "engine.quant": {"kernels", "engine.weights"},
    "engine.models": {"engine.layers", "engine.quant", "engine.weights", "engine.parallel"},
    "engine.sampling": {"kernels", "engine.parallel"},
    "engine.cache": set(),
    "engine.core": {"engine.cache"},
    "engine.speculation": set(),
    "engine.text": set(),
    "engine.runner": {
        "kernels",
        "kernels.compilation",
        "engine.parallel",
        "engine.layers",
        "engine.models",
        "engine.quant",
        "engine.weights",
        "engine.sampling",
        "engine.cache",
    },
    "engine.beam": {"engine.core"},
    "engine.structured": {"engine.core", "engine.text"},
    "engine.api": {
        "engine.beam",
        "engine.core",
        "engine.cache",
        "engine.runner",
        "engine.parallel",
        "engine.models",
        "engine.speculation",
        "engine.structured",
        "kernels.compilation",  # which imports no torch until it compiles
    },
    # The rooms of serving: what joins processes, a stub's process, the engine's process, what starts them all.
    "engine.serving.link": set(),
    "engine.serving.frontend": {"engine.serving.link", "engine.text"},
    "engine.serving.host": {"engine.serving.link", "engine.api"},
    "engine.serving.launch": {
        "engine.serving.link",
        "engine.serving.frontend",
        "engine.text",
        "engine.models",
        "engine.parallel",
    },
    "engine.serving": {"engine.serving.link", "engine.serving.frontend", "engine.text"},  # what model.py files name
    "engine.demo": {"engine.text"},
    "clients": {
        "engine.types",
        "engine.text",
        "engine.serving.launch",
        "engine.serving.frontend",
        "engine.config",
        "engine.speculation",
    },
}
# The files that may import torch: what executes. Everything else is the control side.
TORCH_SIDE = (
    "kernels/",
    "engine/layers/",
    "engine/models/",
    "engine/weights/",
    "engine/quant/formats/",
    "engine/quant/format",
    "engine/quant/plan",
    "engine/quant/cache_scales",
    "engine/quant/device",
    "engine/quant/weight",
    "engine/sampling/",
    "engine/runner/",
    "engine/parallel/communicator",
    "engine/parallel/context",
    "engine/parallel/peers",
    "engine/parallel/vocabulary",
    "engine/parallel/slices",
    "engine/parallel/start",
    "engine/cache/tensors",
    "engine/demo/train",
)


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file: Path, *, at_import_only: bool = False) -> Iterator[str]:
    """Modules that `file` imports. at_import_only: leave out imports inside functions and for type checkers."""
    tree = ast.parse(file.read_text())
    for node in _module_level(tree) if at_import_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                yield deeper if _is_module(deeper) else node.module


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _module_level(child)


def _is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def part_of(module: str) -> str:
    """The part that rules are about: kernels or their compilation, clients, or engine and one level below it; in
    serving, the room."""
    parts = module.split(".")
    for depth in (3, 2):
        if ".".join(parts[:depth]) in MAY_IMPORT:
            return ".".join(parts[:depth])
    return ".".join(parts[:2]) if parts[0] == "engine" else parts[0]


@pytest.mark.parametrize("file", sources("kernels", "engine", "clients"), ids=module_of)
def test_imports_run_one_way(file: Path) -> None:
    own = part_of(module_of(file))
    base = own == "engine" or module_of(file) in CONTRACTS
    allowed: set[str] = set() if base else MAY_IMPORT[own]
    for module in imports(file):
        part = part_of(module)
        if module.split(".")[0] not in ("kernels", "engine", "clients", "perf", "tests") or part == own:
            continue
        assert (module in CONTRACTS and not own.startswith("kernels")) or part in allowed, (
            f"{own} must not import {module}"
        )


@pytest.mark.parametrize(
    "file",
    [f for f in sources("engine", "clients") if not f.relative_to(ROOT).as_posix().startswith(TORCH_SIDE)],
    ids=module_of,
)
def test_the_control_side_imports_no_torch(file: Path) -> None:
    assert not {m.split(".")[0] for m in imports(file, at_import_only=True)} & {"torch", "triton", "transformers"}


def test_frontends_and_clients_run_without_torch() -> None:
    """Not only the direct imports: nothing that they import brings torch or transformers along."""
    program = """
import sys
import clients.python.cli, clients.openai, engine.api, engine.core.scheduler, engine.cache.manager, engine.text
from engine.serving.frontend import request_tensors, frontend, responses, supervisor
print([name for name in ("torch", "triton", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_only_tests_and_training_need_transformers() -> None:
    users = {module_of(f) for f in sources("kernels", "engine", "clients") if "transformers" in set(imports(f))}
    assert users <= {"engine.demo.train"}


@pytest.mark.parametrize("file", [f for f in sources("engine") if "models" not in f.parts], ids=module_of)
def test_families_are_named_by_their_own_files_alone(file: Path) -> None:
    """The engine knows layers by their configs. (The demo is a checkpoint of a family, so its maker names that one;
    "llama3" is what configs call a kind of rotary embedding, "exllama" what they call kernels of others; styles of
    arguments are asked for by names that others gave them.)"""
    if "demo" not in file.parts and file.parts[-2:] != ("structured", "styles.py"):
        named = re.findall(r"(?i)\bllama\b|(?<!ex)llama[^3]|qwen|gemma|mistral|deepseek|kimi", file.read_text())
        assert named == []


def test_only_env_reads_the_environment() -> None:
    for file in sources("kernels", "engine"):
        if module_of(file) == "engine.env":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            assert name not in ("environ", "getenv"), f"{module_of(file)}:{node.lineno} reads the environment"  # type: ignore[attr-defined]
