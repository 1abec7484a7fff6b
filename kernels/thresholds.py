"""Sizes from which kernels go another way, where those who prepare their work go by them too. Needs no Triton."""

from __future__ import annotations

# Rows up to which the launch that scores and chooses experts norms them as well; more are normed by a launch before it.
NORMED_ROWS = 16
# The longest context of a sequence that takes small tiles of keys: most of its time passes before and behind the keys.
SHORT_CONTEXT = 512
