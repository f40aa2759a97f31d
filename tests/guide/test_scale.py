"""The figures of docs/guide/scale.md are those of dry runs.

After a wanted change: UPDATE_GUIDE=1 python -m pytest tests/guide
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot.cli.verbs.dry import shown
from surefoot.config import override
from surefoot.recipes.find import find_recipe
from surefoot.study.dry import dry_run, telling_ranks

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "scale.md"


def rows() -> list[list[str]]:
    """The cells of each worked layout."""
    lines = PAGE.read_text().partition("## Worked layouts")[2].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return cells[2:]


def test_every_size_is_there() -> None:
    assert {row[0] for row in rows()} == {"8", "64", "512", "4096", "16384"}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row[1], marks=[pytest.mark.long] if int(row[0]) > 8 else []) for row in rows()],
)
def test_the_page_says_what_a_dry_run_finds(row: list[str]) -> None:
    name, *sets = row[1].split()
    run = override(find_recipe(name), sets)
    assert run.plan.num_ranks == int(row[0])
    found = max((dry_run(run, rank) for rank in telling_ranks(run)), key=lambda each: each.peak_bytes)
    sizes = (
        found.holdings.parameter_bytes,
        found.gradient_bytes,
        found.holdings.state_bytes,
        found.kept_bytes,
        found.peak_bytes,
        sum(amount.sent for amount in found.flows.values()),
    )
    wanted = [*row[:2], *map(shown, sizes)]
    if os.environ.get("UPDATE_GUIDE"):
        old = next(line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row[0]} | {row[1]} |"))
        PAGE.write_text(PAGE.read_text().replace(old, f"| {' | '.join(wanted)} |"))
        return
    assert row == wanted
    assert found.peak_bytes < 75 << 30
