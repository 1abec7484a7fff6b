"""What the environment may say of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.models.reader import ConfigError
from engine.runner import threads


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_few_weights_take_one_thread_and_many_what_torch_takes() -> None:
    threads.choose(threads.ONE_THREAD_BYTES + 1, None)
    assert torch.get_num_threads() == 2
    threads.choose(threads.ONE_THREAD_BYTES, None)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("said", ["1", "4", " 2 ", "+2", "02", "2,1", "2 , 1"])
def test_a_number_is_torchs_business(said: str) -> None:
    threads.choose(1, said)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("said", ["many", "0", "-1", "1.5", "2x", "2,", ",", "1,0", "9" * 20])
def test_what_torch_would_ignore_is_refused(said: str) -> None:
    with pytest.raises(
        ConfigError, match=f"OMP_NUM_THREADS is '{said}', and torch ignores it: set it to the number of"
    ):
        threads.choose(1, said)
