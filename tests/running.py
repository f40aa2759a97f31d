"""Whether a process that a test started is still there."""

from __future__ import annotations

from pathlib import Path


def is_running(number: int) -> bool:
    """Neither gone nor waiting for someone to ask how it ended."""
    status = Path(f"/proc/{number}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
