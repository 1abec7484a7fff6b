"""Where kernels run in these tests: compiled on a GPU when there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _memory_for_all(device: torch.device) -> Iterator[None]:
    """Several processes of tests share a GPU, and references of real shapes take gigabytes: none keeps what it had."""
    yield
    if device.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="package", autouse=True)
def _where_kernels_run(device: torch.device) -> Iterator[None]:
    """Kernels are bound to the interpreter when their module is first imported, so the ops import them lazily."""
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":
            from tests.kernels import interpreter

            patch.setenv("TRITON_INTERPRET", "1")
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            interpreter.complete_casts(patch)
            with interpreter.language_bound_once():
                yield
            torch.set_num_threads(threads)
        else:
            yield
