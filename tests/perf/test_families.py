"""The families' table: floors from the declarations, rows from results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from perf import families

CONFIGS = Path(__file__).parents[1] / "models" / "configs"


@pytest.mark.parametrize(
    ("name", "floor"),
    [("llama-3.1-8b", 3.53), ("qwen3-30b-a3b", 1.434), ("deepseek-v2-lite", 1.154), ("qwen3.5-4b-text", 2.001)],
)
def test_a_token_reads_the_experts_it_chose_the_cache_and_state_and_no_embedding(
    name: str, floor: float, tmp_path: Path
) -> None:
    shutil.copy(CONFIGS / f"{name}.json", tmp_path / "config.json")
    assert families.floor_ms(tmp_path) == pytest.approx(floor, abs=0.002)


def test_table_holds_what_was_measured_last(tmp_path: Path) -> None:
    row = {"model": "a", "row": "1x128/256", "ttft_ms": {"p50": 9.0}, "commit": "0123456789"}
    many = {"row": "64x1024/128", "output_tokens_per_s": 3000.4, "itl_ms": {"p50": 5.0}, "ttft_ms": {"p50": 300.0}}
    lines = [
        {**row, "tpot_ms": {"p50": 3.0}},
        {**row, "tpot_ms": {"p50": 2.0}},
        {**row, **many},
        {**row, **many, "row": "256x1024/128", "output_tokens_per_s": 5000.4},
        {"model": "a", "row": "floor", "floor_ms": 1.0, "layers": 4},
    ]
    results = tmp_path / "results.jsonl"
    results.write_text("\n".join(json.dumps(line) for line in lines))
    made = families.table(families.read(results))
    assert "| a, 4 layers | 1.00 ms | 2.00 ms | 50% | 9.0, - ms | 3,000 | 5.0, 300 ms | 5,000 |" in made
    assert "| 0123456 |" in made


def test_floors_that_results_lack_are_added_once(tmp_path: Path) -> None:
    configs, results = tmp_path / "configs", tmp_path / "results.jsonl"
    (configs / "llama-3.1-8b").mkdir(parents=True)
    shutil.copy(CONFIGS / "llama-3.1-8b.json", configs / "llama-3.1-8b" / "config.json")
    rows = [{"model": model, "row": "start", "ready_s": 9.0} for model in ("llama-3.1-8b", "gemma-3-4b", "another")]
    results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    families.add_floors(configs, results)
    families.add_floors(configs, results)
    floors = [row for row in map(json.loads, results.read_text().splitlines()) if row["row"] == "floor"]
    assert [(row["model"], row["floor_ms"]) for row in floors] == [("llama-3.1-8b", 3.531), ("gemma-3-4b", 1.83)]


def test_table_stands_between_its_marks() -> None:
    text = f"before\n{families.MARKS[0]}\nold\n{families.MARKS[1]}\nafter"
    once = families.written(text, "new")
    assert once == families.written(once, "new")
    assert once.startswith("before")
    assert once.endswith("after")
    assert "old" not in once
    assert all(mark in families.DOCS.read_text(encoding="utf-8") for mark in families.MARKS)
