"""The prompts of one request with a batch dimension, as TensorRT-LLM's clients send them (`--batch-inputs`).

Each prompt has answers and responses of its own, with `batch_index`; an error of one of them ends the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy.typing as npt

from engine.serving.frontend.choices import Choices, Taken, take_alone
from engine.serving.frontend.metrics import Figures
from engine.serving.frontend.stream import Stream
from engine.types import MAX_ANSWERS, FinishReason, RequestError

Tensors = Mapping[str, npt.NDArray[Any]]


def prompts(tensors: Tensors) -> list[Tensors]:
    """The tensors of each prompt, without their batch dimension. Raises RequestError."""
    counts = {len(tensor) for tensor in tensors.values()}
    if len(counts) != 1:
        raise RequestError(f"tensors have {sorted(counts)} entries: send one a prompt of the batch")
    return [{name: tensor[i] for name, tensor in tensors.items()} for i in range(counts.pop())]


def check_answers(count: int) -> None:
    """Raises RequestError when a batch asks for too many answers together."""
    if count > MAX_ANSWERS:
        raise RequestError(
            f"the prompts of a batch ask for {count} answers together; at most {MAX_ANSWERS} are allowed"
        )


class Batch:
    """The answers of all prompts, in the place of one prompt's `Choices`."""

    def __init__(self, rows: Sequence[Sequence[Stream]]) -> None:
        """rows: of each prompt the streams of its answers."""
        first = rows[0][0]
        self.streams = [stream for row in rows for stream in row]
        self._choices = [Choices(row) if len(row) > 1 else None for row in rows]
        self._rows = rows
        self._reasons: list[FinishReason | None] = [None] * len(rows)
        for index, row in enumerate(rows):
            for stream in row:
                stream.choices, stream.batch_index = self, index
                stream.sending, stream.ending = first.sending, first.ending

    @property
    def open(self) -> list[Stream]:
        return [stream for at in self._open_rows() for stream in self._open_in(at)]

    def take(self) -> Taken:
        """What came for the prompts since the last call, each with responses of its own. An error of one ends all."""
        answers, stop, finished = [], [], []
        for at in self._open_rows():
            choices = self._choices[at]
            taken = take_alone(self._rows[at][0]) if choices is None else choices.take()
            stop += taken.stop
            finished += taken.finished
            failed = [answer for answer in taken.answers if answer[0][1].error is not None]
            if failed:
                rest = [stream for stream in self.open if stream.batch_index != at]
                return Taken(failed, [*stop, *rest], finished, taken.reason)
            answers += taken.answers
            self._reasons[at] = taken.reason
            if taken.reason is not None and choices is None:
                finished += self._rows[at]
        return Taken(answers, stop, finished, self._reason())

    def figures(self) -> Figures | None:
        """What all prompts took together, for the metrics."""
        each = [row[0].figures() if choices is None else choices.figures() for row, choices in self._by_row()]
        heard = [figures for figures in each if figures is not None]
        if not heard:
            return None
        return msgspec.structs.replace(
            heard[0],
            decode_s=max(figures.decode_s for figures in heard),
            num_prompt=sum(figures.num_prompt for figures in heard),
            num_computed=sum(figures.num_computed for figures in heard),
            num_generated=sum(figures.num_generated for figures in heard),
            num_longest=max(figures.num_longest for figures in heard),
        )

    def _by_row(self) -> list[tuple[Sequence[Stream], Choices | None]]:
        return list(zip(self._rows, self._choices, strict=True))

    def _open_rows(self) -> list[int]:
        return [at for at, reason in enumerate(self._reasons) if reason is None]

    def _open_in(self, at: int) -> Sequence[Stream]:
        choices = self._choices[at]
        return self._rows[at] if choices is None else choices.open

    def _reason(self) -> FinishReason | None:
        if None in self._reasons:
            return None
        return FinishReason.LENGTH if FinishReason.LENGTH in self._reasons else FinishReason.STOP
