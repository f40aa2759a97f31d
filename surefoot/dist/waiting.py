"""How long this process has waited for others: what is left of a step's time is its own work."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist


class WaitClock:
    """Context that adds up the seconds inside torch's waits for collectives, which on a CPU block.

    Every collective of torch, FSDP2's and ours, ends in `Work.wait`; torch has no hook there, so the method is replaced
    as long as the context lasts. On a GPU a wait returns at once and there is nothing to count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> Self:
        work: Any = dist.Work
        self._wait = wait = work.wait

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return wait(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - started

        work.wait = timed
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        work: Any = dist.Work
        work.wait = self._wait
