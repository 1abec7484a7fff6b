from __future__ import annotations

import re
from pathlib import Path

PERF = Path(__file__).parents[2] / "perf"


def test_every_tool_is_listed() -> None:
    tools = {file.stem for file in PERF.glob("*.py")} - {"__init__"}
    listed = set(re.findall(r"`([a-z_]+)`", (PERF / "README.md").read_text(encoding="utf-8")))
    assert tools <= listed
    assert listed <= tools
