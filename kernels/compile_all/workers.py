"""Processes that walk cases: one that the compiler ends costs the case that it was at, which is reported."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from kernels.compile_all.launches import Failure, Report, title, walk
from kernels.compile_all.targets import TARGETS
from kernels.registry import Op

# Cases that a process takes at once.
MAX_CASES = 16


@dataclass(frozen=True, slots=True)
class Task:
    """Cases first to end − 1 of an op, for one architecture."""

    op: str
    arch: int
    first: int
    end: int


def tasks(ops: Iterable[str], archs: Iterable[int]) -> list[Task]:
    """All cases of the ops for all architectures, those of one op together."""
    counts = {op: len(Op(op).cases()) for op in ops}
    return [
        Task(op, arch, first, min(first + MAX_CASES, count))
        for op, count in counts.items()
        for arch in archs
        for first in range(0, count, MAX_CASES)
    ]


def run(task: Task) -> Report:
    op = Op(task.op)
    return walk(op, op.cases()[task.first : task.end], TARGETS[task.arch])


def run_all(todo: Iterable[Task], jobs: int, done: Callable[[Report], None]) -> None:
    """Runs every task in `jobs` processes and hands over their reports as they come."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in todo:
        waiting.put(task)
    one = threading.Lock()

    def hand_over(report: Report) -> None:
        with one:
            done(report)

    threads = [threading.Thread(target=_serve, args=(waiting, hand_over), daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _serve(waiting: queue.SimpleQueue[Task], done: Callable[[Report], None]) -> None:
    """Runs tasks in one process until none waits."""
    while True:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_parent) as process:
            while True:
                try:
                    task = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done(process.submit(run, task).result())
                except BrokenProcessPool:
                    break
        if task.end - task.first > 1:
            for first in range(task.first, task.end):
                waiting.put(Task(task.op, task.arch, first, first + 1))
        else:
            done(_ended(task))


def _end_with_parent() -> None:
    """A process whose parent was killed would wait for tasks for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _ended(task: Task) -> Report:
    name = title(Op(task.op).cases()[task.first])
    report = Report(task.op, task.arch, cases=1)
    report.failures.append(Failure(task.op, task.arch, name, "launcher", "ended the process that compiled it"))
    return report
