"""`surefoot train --out RUN --continue`: one command that starts a run and, given again, continues it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_same_command_starts_and_continues(command: Command, saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", saved, "--out", run, "--continue")
    code, out, error = command(*arguments)
    assert code == 0, error
    assert "resuming" not in out
    facts = json.loads((run / "facts.json").read_text())["result"]
    code, out, error = command(*arguments)
    assert code == 0, error
    assert "resuming from" in out
    assert steps(run) == [1, 2]
    assert json.loads((run / "facts.json").read_text())["result"] == facts


def test_a_folder_with_the_logs_of_a_launcher_is_still_new(command: Command, saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "logs").mkdir(parents=True)
    assert command("train", saved, "--out", run, "--continue")[0] == 0
    assert steps(run) == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--continue",), ("--continue: True: needs --out RUN",)),
        (("--continue", "--resume", "RUN"), ("--continue: True: needs --out RUN",)),
        (("--continue", "--out", "RUN", "--set", "optim.lr=1"), ("optim.lr", "makes another run")),
        (("--continue", "--out", "RUN", "--accept", "optim.lr"), ("--accept", "goes with --resume only")),
        (("--out", "RUN"), ("already exists",)),
    ],
)
def test_what_cannot_continue_is_refused_and_changes_nothing(
    command: Command, saved: Path, tmp_path: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    assert command("train", saved, "--out", run)[0] == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, error = command("train", saved, *(str(run) if word == "RUN" else word for word in arguments))
    assert code == 2
    assert error.count("\n") == 1
    for part in parts:
        assert part in error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
