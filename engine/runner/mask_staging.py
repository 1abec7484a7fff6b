"""Where the masks of a step are written on the host, and their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.sampler import EntryMasks


class MaskStaging:
    """On a GPU masks are written to pinned memory and go up on a stream of their own, beside the step that they are
    for. Two buffers: while one is on its way up, the next step's masks are written into the other.

    One step at a time is between `rows` and `send`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._hosts = [self._host(0) for _ in range(1 + self._cuda)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._sent = [torch.cuda.Event() for _ in self._hosts] if self._cuda else []
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._turn = 0
        self._size = (0, 0)

    def rows(self, count: int, words: int) -> npt.NDArray[np.int32]:
        """[count, words] int32 of any content, to be written before `send`."""
        if self._cuda:
            self._turn = 1 - self._turn
            self._sent[self._turn].synchronize()
        first, size = _words_of_places(count), _words_of_places(count) + count * words
        if len(self._arrays[self._turn]) < size:
            host = self._host(max(size, 2 * len(self._arrays[self._turn])))
            self._hosts[self._turn], self._arrays[self._turn] = host, host.numpy()
        self._size = (count, words)
        return self._arrays[self._turn][first:size].reshape(count, words)

    def send(self, places: Sequence[int]) -> EntryMasks:
        """The masks that were written: of the draws at `places`, one each."""
        count, words = self._size
        first, size = _words_of_places(count), _words_of_places(count) + count * words
        self._arrays[self._turn][:count] = places
        host = self._hosts[self._turn][:size]
        sent = host if self._stream is None else self._sent_up(host, self._stream)
        return EntryMasks(sent[:count], sent[first:].view(count, words))

    def _sent_up(self, host: torch.Tensor, stream: torch.cuda.Stream) -> torch.Tensor:
        with torch.cuda.stream(stream):
            sent = host.to(self._device, non_blocking=True)
            self._sent[self._turn].record(stream)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._sent[self._turn])
        sent.record_stream(current)
        return sent

    def _host(self, words: int) -> torch.Tensor:
        return torch.empty(words, dtype=torch.int32, pin_memory=self._cuda)


def _words_of_places(count: int) -> int:
    """Words in front of the masks, which begin on 16 bytes: Triton compiles a kernel anew for a pointer that does
    not."""
    return -(-count // 4) * 4
