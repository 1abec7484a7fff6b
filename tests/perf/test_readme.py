from __future__ import annotations

import re
from pathlib import Path

PERF = Path(__file__).parents[2] / "perf"


def test_every_tool_is_listed() -> None:
    files = [file.relative_to(PERF.parent).with_suffix("") for file in PERF.rglob("*.py") if file.stem != "__init__"]
    tools = {".".join(file.parts) for file in files}
    listed = set(re.findall(r"`(perf\.[a-z_.]+)`", (PERF / "README.md").read_text(encoding="utf-8")))
    assert tools <= listed
    assert listed <= tools
