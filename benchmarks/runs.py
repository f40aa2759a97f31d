"""Training runs one after another for a table: started again, finished runs are read and a broken one goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def heldout(folder: Path) -> float | None:
    """Final held-out bits per byte of a finished run; None of one that is not."""
    facts = folder / "facts.json"
    if not facts.is_file():
        return None
    value = json.loads(facts.read_text(encoding="utf-8")).get("result", {}).get("heldout_bits_per_byte")
    return None if value is None else float(value)


def train(recipe: str, folder: Path, sets: Sequence[str], *options: str, is_quiet: bool = False) -> None:
    """One run by the command line, in a process of its own."""
    changes = [option for assignment in sets for option in ("--set", assignment)]
    program = "from surefoot.cli.main import main; main()"
    subprocess.run(
        [sys.executable, "-c", program, "train", recipe, "--out", str(folder), *changes, *options],
        check=True,
        capture_output=is_quiet,
    )


def trained(recipe: str, folder: Path, sets: Sequence[str]) -> float:
    """The same, once the run has been started or continued to its end."""
    if (known := heldout(folder)) is not None:
        return known
    train(recipe, folder, sets, "--continue")
    found = heldout(folder)
    if found is None:
        raise SystemExit(f"{folder} was stopped; run this again to go on")
    return found
