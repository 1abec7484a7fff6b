"""Rigs for the tests of frontends, links and supervisors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.demo.make import make
from engine.serving.frontend import supervisor
from engine.serving.frontend.settings import FrontendConfig
from engine.serving.link.run_folder import RunFolder
from engine.text import Tokenizer
from tests.serving.rig import Rig


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("checkpoint")
    make(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture
def rig(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Makes rigs and closes them. The folder is short: a socket's path has at most 107 bytes. Engines that die in a row
    are started again after a quarter of the usual pauses."""
    pauses = tuple(pause / 4 for pause in supervisor._BACKOFF_S)
    monkeypatch.setattr(supervisor, "_BACKOFF_S", pauses)
    rigs: list[Rig] = []
    with contextlib.ExitStack() as stack:

        def build(
            model: str = "fine",
            name: str = "f0",
            entered: Callable[[RunFolder], object] = lambda folder: None,
            **config: object,
        ) -> Rig:
            made = Rig(tmp_path, tokenizer, model, FrontendConfig(**config), name, entered)  # type: ignore[arg-type]
            stack.callback(made.close)
            rigs.append(made)
            assert made.engine.settled.wait(30)
            return made

        yield build
        # Rigs of one process take the first of them that leaves for the last.
        for made in rigs:
            made.disconnect()
