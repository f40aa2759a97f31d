"""A pool of ranks that outlives its jobs: forked once, joined by gloo, given one function after another.

For tests and `surefoot verify`: starting eight ranks takes seconds, a job on ranks that are there a tenth of one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from surefoot.dist.orphans import follow
from surefoot.dist.watch import CONSEQUENCES


class RankError(Exception):
    """A job failed on some ranks; the text holds the traceback of the first that failed by itself."""


class Pool:
    """`num_ranks` forked processes in one gloo group. A failed or stuck job ends the processes; the next starts new ones."""

    def __init__(self, num_ranks: int, timeout: float = 60.0) -> None:
        self.num_ranks, self.timeout = num_ranks, timeout
        self._processes: list[Any] = []
        self._jobs: list[Any] = []
        self._results: Any = None
        self._place = ""

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float | None = None) -> list[Any]:
        """`function(*arguments)` on every rank; what each returned, by rank. `RankError` where one raised or got stuck."""
        if not self._processes:
            self._start()
        for jobs in self._jobs:
            jobs.put((function, arguments))
        deadline = time.monotonic() + (timeout or self.timeout)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.num_ranks:
            try:
                rank, is_good, value = self._results.get(timeout=0.2)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
                if dead and not failures:
                    failures.update({rank: f"rank {rank} died" for rank in dead})
                late = time.monotonic() > deadline
                if dead or late or failures:
                    silent = sorted(set(range(self.num_ranks)) - results.keys() - failures.keys())
                    stacks = "" if failures else self._stacks(silent)
                    self.close(now=True)
                    if failures:
                        raise RankError(_cause(failures)) from None
                    raise RankError(f"ranks {silent} gave no answer in time\n{stacks}") from None
                continue
            if is_good:
                results[rank] = pickle.loads(value)
            else:
                failures[rank] = value
                # The others may wait for this rank until their own timeout: give them a moment, then end them.
                deadline = min(deadline, time.monotonic() + 2.0)
        if failures:
            self.close(now=True)
            raise RankError(_cause(failures))
        return [results[rank] for rank in range(self.num_ranks)]

    def close(self, *, now: bool = False) -> None:
        """End the processes."""
        for process, jobs in zip(self._processes, self._jobs, strict=True):
            if now:
                process.kill()
            else:
                jobs.put(None)
        for process in self._processes:
            process.join(10)
        self._processes, self._jobs, self._results = [], [], None
        shutil.rmtree(self._place, ignore_errors=True)

    def _stacks(self, ranks: Sequence[int]) -> str:
        """Where the first two of `ranks` are."""
        for rank in ranks[:2]:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        texts = [(rank, Path(self._place, f"stack-{rank}").read_text(encoding="utf-8")) for rank in ranks[:2]]
        return "\n".join(f"rank {rank}: {text}" for rank, text in texts)

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._place = tempfile.mkdtemp(prefix="surefoot-pool-")
        self._results = context.Queue()
        self._jobs = [context.SimpleQueue() for _ in range(self.num_ranks)]
        self._processes = [
            context.Process(
                target=_serve,
                args=(os.getpid(), rank, self.num_ranks, self._place, self._jobs[rank], self._results, self.timeout),
                daemon=True,
            )
            for rank in range(self.num_ranks)
        ]
        for process in self._processes:
            process.start()


def _serve(parent: int, rank: int, num_ranks: int, place: str, jobs: Any, results: Any, timeout: float) -> None:
    follow(parent, signal.SIGKILL)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    stack = Path(place, f"stack-{rank}").open("w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{place}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )
    while (job := jobs.get()) is not None:
        function, arguments = job
        try:
            # Pickled here, so that what cannot be sent is this job's error; as bytes, so that tensors travel by value.
            results.put((rank, True, pickle.dumps(function(*arguments))))
        except BaseException:
            results.put((rank, False, f"rank {rank}: {traceback.format_exc()}"))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _cause(failures: dict[int, str]) -> str:
    """The failure that came first by its nature: not one of a rank whose peer went away."""
    own = [text for text in failures.values() if not any(mark in text for mark in CONSEQUENCES)]
    return (own or list(failures.values()))[0]
