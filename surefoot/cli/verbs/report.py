"""`surefoot report`."""

from __future__ import annotations

from pathlib import Path

from surefoot.report.page import write_report


def run(runs: list[Path], out: Path | None) -> None:
    """Write the page and print where it is."""
    print(write_report(runs, out or runs[0] / "report.html").resolve())
