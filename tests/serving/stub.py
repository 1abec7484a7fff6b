"""What the Python backend gives a model inside a stub, as far as a frontend uses it: it exists in no other process."""

from __future__ import annotations

import json
import queue
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class Metric:
    def __init__(self) -> None:
        self.value = 0.0
        self.observed: list[float] = []

    def increment(self, by: float) -> None:
        self.value += by

    def set(self, to: float) -> None:
        self.value = to

    def observe(self, value: float) -> None:
        self.observed.append(value)


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    made: ClassVar[dict[str, Metric]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> Metric:
        return self.made.setdefault(":".join([self._name, *labels.values()]), Metric())


class Response:
    def __init__(self, output_tensors: list[Tensor], error: Any = None) -> None:
        self.tensors = {t.name(): t.as_numpy() for t in output_tensors}
        self.error = error


class Error(Exception):
    INVALID_ARG, UNAVAILABLE, UNSUPPORTED, NOT_FOUND, INTERNAL, CANCELLED = range(6)

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


BACKEND = SimpleNamespace(
    Tensor=Tensor,
    MetricFamily=MetricFamily,
    InferenceResponse=Response,
    TritonError=Error,
    TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
)


class Request:
    """A request and its response sender in one. `answers` receives (response, is last)."""

    def __init__(self, parameters: dict[str, Any] | None = None, **tensors: Any) -> None:
        self._parameters = parameters or {}
        self._tensors = tensors
        self.answers: queue.Queue[tuple[Response, bool]] = queue.Queue()
        self.cancelled = False
        self.finals = 0

    def inputs(self) -> list[Tensor]:
        kinds = {bytes: np.object_, bool: np.bool_, int: np.int32, float: np.float32}
        made = []
        for name, value in self._tensors.items():
            items = value if isinstance(value, list) else [value]
            made.append(Tensor(name, np.array(items, dtype=kinds[type(items[0])])))
        return made

    def parameters(self) -> str:
        return json.dumps(self._parameters)

    def requested_output_names(self) -> list[str]:
        return ["text_output", "token_ids", "finish_reason"]

    def timeout(self) -> int:
        return 0

    def get_response_sender(self) -> Request:
        return self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def send(self, response: Response, flags: int = 0) -> None:
        assert not self.finals, "something was sent after the final response"
        self.finals += flags
        self.answers.put((response, bool(flags)))

    def next(self, timeout_s: float = 30.0) -> Response:
        return self.answers.get(timeout=timeout_s)[0]

    def all(self) -> list[Response]:
        """Responses to the last one. Raises the request's error."""
        responses, last = [], False
        while not last:
            response, last = self.answers.get(timeout=30.0)
            if response.error is not None:
                raise response.error
            responses.append(response)
        return responses


def tokens_of(responses: list[Response]) -> list[int]:
    return [int(token) for response in responses for token in response.tensors["token_ids"]]
