"""Words come from host memory and go there: on a GPU from and to pinned memory, which its threads reach themselves."""

from __future__ import annotations

import torch

from kernels.registry import Op
from kernels.testing import bound, randint, seeded

OP = Op("move_words")


def test_words_go_from_the_host_to_the_device_and_back(device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    words = randint(seeded(torch.device("cpu")), torch.device("cpu"), -(1 << 31), 1 << 31, 5003)
    changes = torch.stack((torch.randperm(7000)[:2100].int(), words[:2100]))
    source, sent = (of.pin_memory() if on_gpu else of for of in (words, changes))
    held = torch.zeros(5003, dtype=torch.int32, device=device)
    table = torch.zeros(7000, dtype=torch.int32, device=device)
    back = torch.zeros(5003, dtype=torch.int32, pin_memory=on_gpu)
    bound(OP)(source, held, sent, table)
    bound(OP)(held, back)
    if on_gpu:
        torch.cuda.synchronize()
    assert torch.equal(back, words)
    want = torch.zeros(7000, dtype=torch.int32)
    want[changes[0].long()] = changes[1]
    assert torch.equal(table.cpu(), want)
