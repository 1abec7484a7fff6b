"""When a step under way ends, by how long the last ones of its kind took.

With it the loop launches a step shortly before the one under way ends and not at once when that one begins: who arrives
meanwhile joins the next step instead of the one after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from engine.core.plan import StepPlan

# How long before a step's end the next one is prepared, besides what its launch takes of the host.
LAUNCH_MARGIN_S = 0.0015
MAX_LAUNCH_MARGIN_S = 0.02
# Steps are of one kind within so many rows and so many prompt tokens.
ROWS_OF_A_KIND, TOKENS_OF_A_KIND = 8, 128
# A step is expected to take as long as the shortest of the last ones of its kind, less a part for what a clock at its
# power limit makes of a step; fewer are not enough, since one alone may have made a graph or waited for the host.
KEPT_STEPS, MIN_STEPS, EXPECTED_PART = 4, 2, 0.98

Kind = tuple[int, int]


class LaunchTimer:
    """Times steps that run one after another, each launched before the one in front of it ends. Not thread-safe: the
    loop owns it.

    launch_margin_s: seconds before a step's end at which the next one's launch should be through. It doubles when the
    device ran dry, up to MAX_LAUNCH_MARGIN_S, and comes back to LAUNCH_MARGIN_S over a hundred steps.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.launch_margin_s = LAUNCH_MARGIN_S
        self._clock = clock
        self._took: dict[Kind, deque[float]] = {}
        self._under_way: deque[tuple[Kind, float]] = deque()  # kind and launch of the steps that have not ended
        self._free_at = clock()
        self._exact = True
        self._launch_s = 0.0

    def launched(self, plan: StepPlan, began: float) -> None:
        """A step was launched, from `began` till now."""
        rows = plan.count.count(1)
        kind = -(-rows // ROWS_OF_A_KIND), -(-(plan.num_tokens - rows) // TOKENS_OF_A_KIND)
        self._under_way.append((kind, began))
        self._launch_s = self._clock() - began

    def ended(self, seen: bool) -> float | None:
        """The first of the steps under way has ended: just now if that was `seen`, else some time ago. Then its
        earliest end counts, for a launch that comes too soon costs only room for those who arrive behind it.

        Returns how many seconds it took, where that is known."""
        kind, launch = self._under_way.popleft()
        began, exact = max(launch, self._free_at), self._exact or launch > self._free_at
        now = self._clock()
        took = now - began if seen and exact else None
        if took is not None:
            self._took.setdefault(kind, deque(maxlen=KEPT_STEPS)).append(took)
        self._free_at = now if seen else min(now, began + self._expected_s(kind))
        self._exact = seen
        return took

    def seconds_left(self) -> float:
        """Seconds until the launch behind the one step under way should begin; 0 or less when it should at once, as it
        should behind a step of a kind that is hardly known. The launch is taken to last as long as the one before."""
        kind, launch = self._under_way[0]
        end = max(launch, self._free_at) + self._expected_s(kind)
        return end - self.launch_margin_s - self._launch_s - self._clock()

    def delayed(self, ran_dry: bool) -> None:
        """A launch was delayed as `seconds_left` said; `ran_dry` when the device had ended its step before. What was
        known of such steps is forgotten then: it was too long, or the host is slow."""
        if ran_dry:
            self._took.pop(self._under_way[0][0], None)
        self.launch_margin_s = (
            min(2 * self.launch_margin_s, MAX_LAUNCH_MARGIN_S)
            if ran_dry
            else max(0.98 * self.launch_margin_s, LAUNCH_MARGIN_S)
        )

    def _expected_s(self, kind: Kind) -> float:
        """Seconds that a step of this kind takes at least; 0 where too few are known."""
        took = self._took.get(kind, ())
        return EXPECTED_PART * min(took) if len(took) >= MIN_STEPS else 0.0
