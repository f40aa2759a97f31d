"""`surefoot profile` refuses what it cannot do before it reads any data."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.cli.main import app
from surefoot.config import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quickstart", "--steps", "0"], "--steps: 0: must be at least 1"),
        (["quickstat"], "RECIPE: 'quickstat': is not a recipe; did you mean quickstart?"),
        (["quickstart", "--set", "plan.pipeline=2", "--ranks", "2"], "plan.pipeline: 2: is not profiled"),
    ],
)
def test_what_cannot_be_profiled_is_named(arguments: list[str], message: str) -> None:
    answer = CliRunner().invoke(app, ["profile", *arguments])
    assert isinstance(answer.exception, ConfigError)
    assert message in str(answer.exception)


def test_a_trace_that_cannot_be_written_is_found_before_any_step(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["profile", "quickstart", "--trace", str(tmp_path / "nowhere" / "trace.json")])
    assert isinstance(answer.exception, OSError)
    assert answer.exception.filename == str(tmp_path / "nowhere" / "trace.json")
