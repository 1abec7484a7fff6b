"""Whether steps of up to a whole token budget are graphs (`runtime.budget_graphs`)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from engine.cache.spec import LatentKV, LayerSpec, PagedKV, window_of
from engine.config import EngineConfig
from engine.layers.build_context import BuildContext
from engine.models.decoder import Decoder
from engine.models.reader import ConfigError
from engine.runner.graphs import BUDGET_QUERY, MAX_BUDGET, MIXED_TOKENS


def hold_all_tokens(specs: Iterable[LayerSpec]) -> bool:
    """Whether every layer caches keys and values, or latents, of all tokens: no window, no state, no choice."""
    return all(isinstance(spec, PagedKV | LatentKV) and window_of(spec) is None for spec in specs)


def makes_budget_graphs(config: EngineConfig, build: BuildContext, decoder: Decoder) -> bool:
    """Whether there are such graphs. A small budget has them anyway.

    "auto" makes them where they were measured to win (docs/experiments/2026-11-28-steps-that-the-host-bounds.md): with
    experts, whose many launches take the host longer than the device, where any chunk has a graph.

    Raises ConfigError where they are asked for and cannot be.
    """
    wanted, budget, longest = config.runtime.budget_graphs, config.scheduler.token_budget, build.max_model_len
    if not wanted or budget <= MIXED_TOKENS[-1]:
        return False
    fits = budget <= MAX_BUDGET and longest >= BUDGET_QUERY
    if wanted == "auto":
        wins = config.runtime.graphs and decoder.has_experts and hold_all_tokens(chain(*decoder.specs))
        return wins and fits and not build.sliced_context
    if build.sliced_context:
        raise ConfigError(
            "runtime.budget_graphs: with parallel.context sliced a graph takes long chunks the slow way: leave one of "
            "them out"
        )
    if not fits:
        raise ConfigError(
            f"runtime.budget_graphs fills steps up with rows of up to {BUDGET_QUERY} tokens: it needs a max_model_len "
            f"of as many, which is {longest}, and a scheduler.token_budget of {MAX_BUDGET} at most, which is {budget}"
        )
    return True
