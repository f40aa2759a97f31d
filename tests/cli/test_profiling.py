"""`surefoot profile` prints its tables, and what it cannot do is one line before any step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Outcome = tuple[int, str, str]


def test_the_tables_are_there(command: Callable[..., Outcome], saved: Path) -> None:
    code, out, error = command("profile", saved, "--steps", 1, "--trace", "trace.json")
    assert code == 0, error
    assert Path("trace.json").stat().st_size > 0
    for part in ("forward", "optimizer", "mixer", "ffn", "norm", "head", "embedding", "matmul ceiling", "MFU: "):
        assert part in out
    assert "by part" in error


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--steps", "0"), ("--steps: 0", "at least 1")),
        (("--trace", "missing/trace.json"), ("missing/trace.json", "No such file")),
        (("--trace", "."), ("Is a directory",)),
        (("--set", "plan.pipeline=2", "--ranks", "2"), ("plan.pipeline: 2", "use pipeline=1")),
    ],
)
def test_bad_input_is_one_line(
    command: Callable[..., Outcome], saved: Path, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    code, _, error = command("profile", saved, *arguments)
    assert code == 2
    assert error.startswith("surefoot: ")
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error


def test_an_unknown_recipe_leaves_no_trace_file(command: Callable[..., Outcome]) -> None:
    code, _, error = command("profile", "quikstart", "--trace", "trace.json")
    assert code == 2
    assert "did you mean quickstart?" in error
    assert not Path("trace.json").exists()
