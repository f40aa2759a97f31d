"""`surefoot diff`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from surefoot.config import diff
from surefoot.recipes.find import find_recipe


def run(left: str, right: str, allow: list[str]) -> None:
    """Print the leaves that differ, or say that none does."""
    console = Console(highlight=False)
    changes = diff(find_recipe(left, allow), find_recipe(right, allow))
    if not changes:
        console.print("no difference")
        return
    table = Table("path", left, right, box=None, pad_edge=False)
    for path, old, new in changes:
        table.add_row(path, _shown(old), _shown(new))
    console.print(table)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
