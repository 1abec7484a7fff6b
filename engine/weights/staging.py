"""Brings tensors from files into parameters, on a few threads.

On a CPU what stands in a file as it stands in the parameter is read straight into it; everything else is read into a
buffer of the thread's and made from there. On a GPU threads read into pinned buffers, and one thread alone sends them
to the device and makes there what is made of them: operations that several threads launch wait for each other, for
the interpreter and for the driver, several times as long as they take. Sources of more than one buffer take turns on
a CPU, so that threads together hold few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue
from threading import Lock

import torch

from engine.weights.checkpoint import Files
from engine.weights.runs import BUFFER_BYTES, Made, Piece, Read, Run, runs

# Called with (bytes done, bytes in all).
Progress = Callable[[int, int], None]

THREADS = {"cuda": 8, "cpu": 2}
# Each thread fills one while another of them is on its way.
BUFFERS = 2 * THREADS["cuda"]


def copy(pieces: Sequence[Piece | Made], progress: Progress | None = None) -> None:
    """Read every piece's bytes into its view, in file order. Raises WeightsError where a transform does."""
    if not pieces:
        return
    first = pieces[0]
    device = (first.views[0][0] if isinstance(first, Made) else first.view).device
    planned = runs(pieces, device)
    total, done = sum(run.num_bytes for run in planned), 0

    def filled(run: Run) -> None:
        nonlocal done
        done += run.num_bytes
        if progress is not None:
            progress(done, total)

    with Files() as files:
        for file in {part.file for run in planned for chunk in run.chunks for part in chunk.parts}:
            files.open(file)
        (_to_device if device.type == "cuda" else _on_host)(planned, files, device, filled)


def _on_host(planned: Sequence[Run], files: Files, device: torch.device, filled: Callable[[Run], None]) -> None:
    """Threads read runs and make them."""
    work: SimpleQueue[Run] = SimpleQueue()
    for run in planned:
        work.put(run)
    lock, large = Lock(), Lock()

    @torch.no_grad()
    def drain() -> None:
        buffer = torch.empty(0, dtype=torch.uint8, device=device)
        while True:
            try:
                run = work.get_nowait()
            except Empty:
                return
            target = run.target
            with large if run.num_bytes > 2 * BUFFER_BYTES else nullcontext():
                if target is None and len(buffer) < run.size:
                    buffer = torch.empty(run.size, dtype=torch.uint8, device=device)
                raw = buffer if target is None else target
                for read in run.reads:
                    files.read_into(read.file, read.start, raw[read.at :][: read.count].numpy().data)
                run.fill(raw)
            with lock:
                filled(run)

    threads = min(THREADS["cpu"], len(planned))
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for future in [pool.submit(drain) for _ in range(threads)]:
            future.result()


@dataclass(frozen=True)
class _Pinned:
    """Memory that reads go to, and the event behind which it may be written again."""

    memory: torch.Tensor
    sent: torch.cuda.Event

    @classmethod
    def of(cls, size: int) -> _Pinned:
        return cls(torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())


def _to_device(planned: Sequence[Run], files: Files, device: torch.device, filled: Callable[[Run], None]) -> None:
    """Threads read, and this one sends and makes."""
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)  # parameters are zeroed on another stream
    size = max(1, min(BUFFER_BYTES, max(read.count for run in planned for read in run.reads)))
    threads = min(THREADS["cuda"], len(planned))
    free: SimpleQueue[_Pinned | None] = SimpleQueue()
    todo: SimpleQueue[tuple[int, Read]] = SimpleQueue()
    came: SimpleQueue[tuple[int, Read, _Pinned] | BaseException] = SimpleQueue()
    waiting = [0] * len(planned)
    for number, run in enumerate(planned):
        for read in chain.from_iterable(whole.split(size) for whole in run.reads):
            todo.put((number, read))
            waiting[number] += 1

    def read_all() -> None:
        try:
            while (buffer := free.get()) is not None:
                try:
                    number, read = todo.get_nowait()
                except Empty:
                    return
                buffer.sent.synchronize()
                files.read_into(read.file, read.start, buffer.memory[: read.count].numpy().data)
                came.put((number, read, buffer))
        except BaseException as error:
            came.put(error)

    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for _ in range(threads):
            pool.submit(read_all)
        try:
            for _ in range(min(BUFFERS, sum(waiting))):
                free.put(_Pinned.of(size))
            with torch.no_grad(), torch.cuda.stream(stream):
                _make(planned, waiting, came, free, device, filled)
        finally:
            for _ in range(threads):
                free.put(None)
    stream.synchronize()
    # What that stream held serves no other.
    torch.cuda.empty_cache()


def _make(
    planned: Sequence[Run],
    waiting: list[int],
    came: SimpleQueue[tuple[int, Read, _Pinned] | BaseException],
    free: SimpleQueue[_Pinned | None],
    device: torch.device,
    filled: Callable[[Run], None],
) -> None:
    """Send what was read, in the order in which it came, and fill runs that are there whole. waiting: reads of each
    run that have not come."""
    held: dict[int, torch.Tensor] = {}
    for _ in range(sum(waiting)):
        one = came.get()
        if isinstance(one, BaseException):
            raise one
        number, read, buffer = one
        run = planned[number]
        if number not in held:
            target = run.target
            # Memory of a run before goes to what comes behind it in the stream.
            held[number] = torch.empty(run.size, dtype=torch.uint8, device=device) if target is None else target
        held[number][read.at :][: read.count].copy_(buffer.memory[: read.count], non_blocking=True)
        buffer.sent.record()
        free.put(buffer)
        waiting[number] -= 1
        if waiting[number] == 0:
            run.fill(held.pop(number))
            filled(run)
