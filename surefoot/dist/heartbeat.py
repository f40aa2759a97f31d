"""Where a rank is in its run: the step and the phase of it, renewed at every change for whoever watches."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from typing import Literal, NamedTuple

Phase = Literal["start", "data", "forward-backward", "optimizer", "check", "evaluate", "save", "end"]

_BOARD_BYTES = 64


class Beat(NamedTuple):
    """One change: how many there were before, what began, and when by the monotonic clock."""

    number: int
    step: int
    phase: str
    since: float


class Heartbeat:
    """The newest beat of this process; where a board is named, a file of its own there shows it even after a kill."""

    def __init__(self, board: Path | None = None, rank: int = 0) -> None:
        self.beat = Beat(0, 0, "start", time.monotonic())
        self._board: mmap.mmap | None = None
        if board is not None:
            with (board / f"rank-{rank}").open("w+b") as file:
                file.truncate(_BOARD_BYTES)
                self._board = mmap.mmap(file.fileno(), _BOARD_BYTES)

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """A phase begins, of `step` or of the same step as before."""
        last = self.beat
        # One assignment: a thread that looks sees the old beat or the new one.
        self.beat = beat = Beat(last.number + 1, last.step if step is None else step, phase, time.monotonic())
        if self._board is not None:
            self._board[:] = f"step {beat.step} ({phase})".encode().ljust(_BOARD_BYTES, b"\0")


def read_board(board: Path, rank: int) -> str:
    """What a rank was last in, as "step 3 (save)"; its start where it has not said anything yet."""
    file = board / f"rank-{rank}"
    text = file.read_bytes().rstrip(b"\0").decode(errors="replace") if file.is_file() else ""
    return text or "its start"
