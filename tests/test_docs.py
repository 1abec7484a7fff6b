"""The pages name what there is: links, files, make targets, and code that is quoted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(ROOT.glob("docs/experiments/*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *EXPERIMENTS])
PARTS = ("clients", "docker", "docs", "engine", "kernels", "model_repository", "perf", "tests")
# They tell what was; a file may be gone since.
HISTORY = (ROOT / "CHANGELOG.md", *EXPERIMENTS)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the page's headings in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", [p for p in PAGES if p not in HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for name in re.findall(rf"`((?:{'|'.join(PARTS)})/[\w./-]+\.\w+)(?:::\w+)?`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"python -m ((?:clients|engine|kernels|perf)(?:\.[a-z_]+)+)", text):
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), name


@pytest.mark.parametrize("page", [p for p in PAGES if p not in HISTORY], ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_short_enough_to_review(page: Path) -> None:
    """Rows of tables are as long as they are."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 160] == []


@pytest.mark.parametrize(("page", "lines"), [("README.md", 120), ("docs/architecture.md", 100)])
def test_the_first_pages_are_short(page: str, lines: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= lines


def test_the_index_of_experiments_names_each_page_once() -> None:
    index = ROOT / "docs" / "experiments" / "README.md"
    named = re.findall(r"\]\(([\w.-]+\.md)\)", index.read_text())
    assert sorted(named) == [page.name for page in EXPERIMENTS if page != index]


@pytest.mark.parametrize("page", EXPERIMENTS, ids=lambda page: page.name)
def test_an_experiment_is_a_page(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= 60


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        named = set(re.findall(r"(?:`|^)make ([a-z][\w-]*)", page.read_text(), re.M))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_the_family_that_a_page_quotes_is_the_one_that_is_served() -> None:
    source = (ROOT / "engine" / "models" / "mistral.py").read_text()
    quoted = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add_a_model.md").read_text(), re.S)
    assert len(quoted) == 2
    for code in quoted:
        assert code in source
