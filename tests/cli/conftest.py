"""The command line run in this process, and a small run to give it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.cli.main import main
from surefoot.config import to_json
from surefoot.train.run import Run

Outcome = tuple[int, str, str]


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Outcome]:
    """Run the command line in an empty working directory; (exit code, stdout, stderr)."""
    home = tmp_path / "work"
    home.mkdir()
    monkeypatch.chdir(home)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["surefoot", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def saved(tiny: Callable[..., Run], tmp_path: Path) -> Path:
    """A run.json of the tiny run."""
    file = tmp_path / "tiny.json"
    file.write_text(to_json(tiny("train.num_steps=2", "observe.evaluate_every=null")))
    return file
