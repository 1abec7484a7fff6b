"""Several runs of one point: the median of each figure, and its least and greatest value beside it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def combined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Figures of one point from those of its runs. With one run, that run.

    Numbers become medians, nested ones too; `low` and `high` hold the range of each; `failed` is summed. What is no
    number (and differs, as the seed of a run does) stands as it was in the first run.
    """
    if len(runs) == 1:
        return {**runs[0], "runs": 1}
    merged = {**_merge(runs, statistics.median), "runs": len(runs), "seed": runs[0].get("seed")}
    if "failed" in runs[0]:
        merged["failed"] = sum(run["failed"] for run in runs)
    return {**merged, "low": _merge(runs, min), "high": _merge(runs, max)}


def _merge(runs: Sequence[dict[str, Any]], pick: Any) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, value in runs[0].items():
        values = [run.get(key) for run in runs]
        if isinstance(value, dict):
            merged[key] = _merge([part for part in values if isinstance(part, dict)], pick)
        elif all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            merged[key] = round(pick(values), 4)
        else:
            merged[key] = value
    return merged
