"""A watch on kernels that are compiled once serving has started: each holds up all requests, so none should be."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

log = logging.getLogger(__name__)


class CompileWatch:
    """Counts the kernels that this process compiles, or loads from Triton's cache on disk, once `arm` was called.

    Whichever engine asks for them: a compilation holds up the others of the process as well. `late` counts by name; a
    name is logged the first time.
    """

    def __init__(self) -> None:
        self.late: Counter[str] = Counter()
        self._armed = False

    @property
    def count(self) -> int:
        return sum(self.late.values())

    def install(self) -> CompileWatch:
        """Be told of every compilation of this process. Triton has one listener: who was told before goes on to be."""
        import triton

        before = triton.knobs.compilation.listener

        def heard(**said: Any) -> None:
            if before is not None:
                before(**said)
            self._heard(**said)

        triton.knobs.compilation.listener = heard
        return self

    def arm(self) -> None:
        """Serving starts: what comes from now on is late."""
        self._armed = True

    def _heard(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if not self._armed:
            return
        name = str(src.name)
        if name not in self.late:
            log.warning(
                "kernel %s was %s while the engine serves (%.0f ms): its steps were held up. Kernels should be ready "
                "by then; please report the model and its settings",
                name,
                "loaded from the disk cache" if cache_hit else "compiled",
                times.total / 1e3,
            )
        self.late[name] += 1
