"""Several ranks on this machine, started and watched by one parent.

Rank 0 has the terminal, every other rank a log file of its own. When one rank ends badly the others are ended too: they
would only wait for it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from surefoot.dist.heartbeat import Heartbeat, read_board
from surefoot.dist.orphans import follow
from surefoot.dist.watch import LOST

GRACE = 10.0
"""Seconds that the others get to end by themselves after one rank failed; less where it was for the loss of another."""

GRACE_LOST = 3.0
BOARD = "SUREFOOT_HEARTBEATS"
"""Environment variable: the folder where each rank shows its parent where it is."""

PARENT = "SUREFOOT_PARENT"
"""Environment variable: the parent's process number."""


def run_ranks(command: Sequence[str], num_ranks: int, logs: Path, say: Callable[[str], None]) -> int:
    """Run `command` as `num_ranks` processes of one group and return the exit code of the first that failed, else 0.

    `logs` is made; it receives rank-1.log and so on. SIGTERM and SIGINT go on to every rank.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    board = Path(tempfile.mkdtemp(prefix="surefoot-ranks-"))
    shared = {
        BOARD: str(board),
        PARENT: str(os.getpid()),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // num_ranks))),
    }
    processes: list[subprocess.Popen[bytes]] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def forward(number: int, _frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    try:
        for number in handlers:
            signal.signal(number, forward)
        for rank in range(num_ranks):
            environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # A session of its own: the terminal's Ctrl-C reaches the parent alone, which passes it on once.
            processes.append(_start(command, environment, None if rank == 0 else logs / f"rank-{rank}.log"))
        return _watch(processes, logs, board, say)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(board, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _start(command: Sequence[str], environment: dict[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    if log is None:
        return subprocess.Popen(command, env=environment, start_new_session=True)
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def _watch(processes: Sequence[subprocess.Popen[bytes]], logs: Path, board: Path, say: Callable[[str], None]) -> int:
    while all(process.poll() is None for process in processes) or not any(process.poll() for process in processes):
        if all(process.poll() is not None for process in processes):
            return 0
        time.sleep(0.05)
    rank = next(rank for rank, process in enumerate(processes) if process.poll())
    code = processes[rank].returncode
    deadline = time.monotonic() + (GRACE_LOST if code == LOST else GRACE)
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(0.05)
    running = [number for number, process in enumerate(processes) if process.poll() is None]
    # A stop by signal is no failure, and rank 0 has said itself what it refused.
    if code not in {128 + signal.SIGINT, 128 + signal.SIGTERM} and (code != 2 or rank):
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        others = "".join(f"; rank {number}, still in {read_board(board, number)}, is ended too" for number in running)
        say(f"rank {rank} {what} in {read_board(board, rank)}{others}{_last_line(logs, rank)}")
    return code if code > 0 else 128 - code


def _last_line(logs: Path, rank: int) -> str:
    log = logs / f"rank-{rank}.log"
    if rank == 0 or not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"; {log} ends with: {lines[-1][:300]}" if lines else f"; {log} is empty"


def start_heartbeat(rank: int) -> Heartbeat:
    """This process's heartbeat, shown to the parent where that is `run_ranks`; if that dies, this process is asked to stop."""
    if (parent := os.environ.get(PARENT)) is not None:
        follow(int(parent), signal.SIGTERM)
    board = os.environ.get(BOARD)
    return Heartbeat(Path(board) if board else None, rank)


def environment_rank() -> tuple[int, int]:
    """(rank, number of ranks) of this process, as a launcher set them; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
