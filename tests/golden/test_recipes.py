"""The resolved configuration of each shipped recipe, as a file: a changed default shows in review.

After a wanted change: UPDATE_GOLDEN=1 python -m pytest tests/golden
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot.config import from_dict, load_json, to_dict, to_json
from surefoot.recipes.find import Recipe, shipped
from surefoot.train.run import Run

FOLDER = Path(__file__).parent / "recipes"


@pytest.mark.parametrize(("name", "recipe"), shipped().items(), ids=shipped())
def test_recipe_is_its_golden_file(name: str, recipe: Recipe) -> None:
    file, run = FOLDER / f"{name}.json", recipe()
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(to_json(run))
    assert file.read_text() == to_json(run)
    assert load_json(file, Run) == run == from_dict(to_dict(run), Run)
    assert run.name == name
    assert recipe.__doc__


def test_no_golden_file_is_left_over() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(shipped())
