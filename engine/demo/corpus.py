"""Training text that ships with Python: module sources, docstrings and the language reference in `pydoc_data`.

Three kinds of documents, all from the standard library of the running interpreter:
- sources as they are, without tests and generated tables;
- prose: the language reference topics, and every docstring under its dotted name;
- chats in ChatML: a question about a name, answered by the first paragraphs of its documentation.

A document is held out when the CRC of its module's (or topic's) name is 0 modulo 50: everything that a held-out module
says is held out together, and what is held out does not depend on file order.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

EXCLUDED = {
    "test",
    "tests",
    "site-packages",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "turtledemo",
    "encodings",
    "__pycache__",
}
HELD_OUT_MODULUS = 50
END = "<|endoftext|>"
USER, ASSISTANT, CLOSE = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n"
QUESTIONS = {
    "module": ("What is the module {name} for?", "Tell me about the Python module {name}.", "Explain {name}."),
    "class": ("What is {name}?", "Describe the class {name}.", "What does the class {name} represent?"),
    "function": ("What does {name} do?", "How does {name} work?", "Explain the function {name}."),
    "topic": (
        "Explain {name} in Python.",
        "What does the language reference say about {name}?",
        "Tell me about {name}.",
    ),
}


@dataclass(frozen=True, slots=True)
class Document:
    """A piece of text. origin: the module or topic it stems from. kind: "source", "prose" or "chat"."""

    name: str
    origin: str
    kind: str
    text: str

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.origin.encode()) % HELD_OUT_MODULUS == 0


def documents() -> list[Document]:
    """Every document of the running interpreter's standard library, sorted by name and kind."""
    found = [*_topics()]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if EXCLUDED.intersection(relative.parts[:-1]) or "pydoc_data" in relative.parts:
            continue
        found.extend(_module(relative, path.read_text("utf-8", errors="ignore")))
    return sorted(found, key=lambda d: (d.name, d.kind))


def _module(path: Path, source: str) -> Iterator[Document]:
    parts = [*path.parts[:-1], path.stem]
    dotted = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    yield Document(dotted, dotted, "source", f"# {path.as_posix()}\n{source}")
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    yield from _docstrings(tree, dotted, dotted, "module")


def _docstrings(node: ast.AST, name: str, origin: str, kind: str) -> Iterator[Document]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        doc = ast.get_docstring(node)
        if doc and len(doc) >= 40:
            yield Document(name, origin, "prose", f"{name}\n\n{doc}\n")
            yield from _chat(name, origin, kind, doc)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, f"{name}.{child.name}", origin, "class")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and not child.name.startswith("_"):
            yield from _docstrings(child, f"{name}.{child.name}", origin, "function")


def _topics() -> Iterator[Document]:
    spec = importlib.util.find_spec("pydoc_data.topics")
    if spec is None:
        return
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name, text in topics.items():
        clean = inspect.cleandoc(text).replace("*", "")
        yield Document(f"topic {name}", f"topic {name}", "prose", f"{clean}\n")
        yield from _chat(name, f"topic {name}", "topic", re.sub(r"^.*\n[=*\-~^\"]+\n", "", clean).strip())


def _chat(name: str, origin: str, kind: str, doc: str) -> Iterator[Document]:
    answer = _first_paragraphs(doc)
    if len(answer) < 40:
        return
    questions = QUESTIONS[kind]
    question = questions[zlib.crc32(name.encode()) % len(questions)].format(name=name)
    yield Document(f"{kind} {name}", origin, "chat", f"{USER}{question}{CLOSE}{ASSISTANT}{answer}{CLOSE}")


def _first_paragraphs(doc: str, limit: int = 700) -> str:
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", doc.strip()):
        flat = " ".join(paragraph.split())
        if not flat or ">>>" in flat or sum(map(len, kept)) + len(flat) > limit:
            break
        kept.append(flat)
    return "\n\n".join(kept)


def split(seed: int = 0) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, each in a shuffled order that depends on the seed alone."""
    every = documents()
    random.Random(seed).shuffle(every)
    return [d for d in every if not d.held_out], [d for d in every if d.held_out]
