"""Which rank the others wait for: each rank's own seconds of work in a step, without its waits, side by side."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from surefoot.dist.waiting import WaitClock

RATIO, PATIENCE = 1.5, 20
"""A rank is slow that takes this many times the median for this many steps in a row."""


class Pace:
    """Keeps the pace of all ranks; `clock` counts this one's waits.

    What a step cost is known at its end and travels with the next step's facts.
    """

    def __init__(self, clock: WaitClock) -> None:
        self._clock = clock
        self._started = self._waited = 0.0
        self._streak: tuple[int, int] = (-1, 0)
        self.own_seconds = 0.0
        self.slowest: tuple[int, float] | None = None

    def begin(self) -> None:
        """A step begins."""
        self._started, self._waited = time.perf_counter(), self._clock.seconds

    def end(self) -> None:
        """It ends."""
        self.own_seconds = (time.perf_counter() - self._started) - (self._clock.seconds - self._waited)

    def compare(self, seconds: Sequence[float]) -> str | None:
        """Take in all ranks' seconds; a line to say where one rank has been slow for a while."""
        # Of two ranks the quicker is the measure; zeros are what ranks say before their first step ends.
        typical = statistics.median_low(seconds)
        if typical <= 0 or len(seconds) < 2:
            self.slowest = None
            return None
        rank = max(range(len(seconds)), key=seconds.__getitem__)
        ratio = seconds[rank] / typical
        self.slowest = (rank, ratio)
        before, steps = self._streak
        self._streak = (rank, (steps if rank == before else 0) + 1) if ratio > RATIO else (-1, 0)
        steps = self._streak[1]
        # Again after twice, four times, … as many steps.
        if steps % PATIENCE or (steps // PATIENCE).bit_count() != 1:
            return None
        return (
            f"rank {rank} is slow: {seconds[rank]:.3g} s of its own work a step, {ratio:.1f} times the median of all ranks, "
            f"for {steps} steps; the others wait for it"
        )
