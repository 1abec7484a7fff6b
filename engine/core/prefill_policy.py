"""How many prompt tokens ride with decoding rows."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.plan import MixedShapes

# Tokens that a shape must leave prompts for each of its rows: with less, larger steps without a shape are cheaper.
MIN_TOKENS_PER_ROW = 10


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """How many prompt tokens a step takes beside decoding rows.

    A step costs what its decoding rows need, and about as much for each prompt token whether they are 500 or 8,192
    (13 µs for 4 billion parameters on an H200). So small shares hold up decoding rows less, and make prompts wait
    longer by the other costs of more steps; and tokens of a shape that stay empty cost as much as others.

    A step takes what fills the largest shape of at most `wave_aligned_tokens` tokens beside its rows; where the runner
    has none, or rows leave less than `MIN_TOKENS_PER_ROW` tokens each of it, `min_tokens` tokens, or `tokens_per_row`
    for each row. A backlog at or above the threshold goes at once, as far as the budget allows: the threshold is
    `backlog_threshold` tokens and `backlog_threshold_per_row` for each row, and there is none when both are 0.
    """

    min_tokens: int
    tokens_per_row: int
    wave_aligned_tokens: int = 0
    backlog_threshold: int = 0
    backlog_threshold_per_row: int = 0

    def prefill_tokens(self, rows: int, backlog: int, shapes: MixedShapes) -> int | None:
        """Prompt tokens for a step of `rows` decoding rows while `backlog` prompt tokens are to be computed; None for
        as many as the step may take."""
        if 0 < self.threshold(rows) <= backlog:
            return None
        room = shapes.room(rows, self.wave_aligned_tokens)
        return room if room and room >= MIN_TOKENS_PER_ROW * rows else max(self.min_tokens, self.tokens_per_row * rows)

    def threshold(self, rows: int) -> int:
        """Prompt tokens in the backlog from which on they go at once, beside so many rows; 0: never."""
        return self.backlog_threshold + self.backlog_threshold_per_row * rows


# A token that is multiplied by less than this part of the weights has experts, which a small step reads for few tokens.
SPARSE_ACTIVE = 0.5
# Weights of fewer bits are quantized, which a step pays for that does not depend on its tokens.
NARROW_BITS = 12


def choose_prefill_policy(
    preference: str, active: float, weight_bits: float, wave_aligned_tokens: int
) -> PrefillPolicy:
    """The policy of a setting for a model whose tokens are multiplied by the part `active` of its weights, of
    `weight_bits` bits each, and are cheapest in steps of `wave_aligned_tokens` tokens.

    In a dense model of 16-bit weights a token costs about the same in such a step as in a whole budget, so a backlog
    goes at once when more wait than decode, or for throughput; with experts, and with quantized weights, tokens are
    cheaper the more there are (docs/performance.md has the figures).
    """
    if preference == "latency":
        return PrefillPolicy(min_tokens=512, tokens_per_row=8, backlog_threshold=8192, backlog_threshold_per_row=2048)
    if active < SPARSE_ACTIVE or weight_bits < NARROW_BITS or preference == "throughput":
        return PrefillPolicy(
            min_tokens=1024, tokens_per_row=32, wave_aligned_tokens=wave_aligned_tokens, backlog_threshold=4096
        )
    return PrefillPolicy(
        min_tokens=1024,
        tokens_per_row=32,
        wave_aligned_tokens=wave_aligned_tokens,
        backlog_threshold=1024,
        backlog_threshold_per_row=1024,
    )
