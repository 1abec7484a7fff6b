"""How many inputs a test of hypothesis takes, and the values that stand where another is expected."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


def sized(count: int, number: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorator: `count` inputs out of `number`, each as slow as it is."""

    def decorate(test: Callable[[], None]) -> Callable[[], None]:
        configured = settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
            print_blob=False,
        )
        return seed(number)(configured(test))

    return decorate
