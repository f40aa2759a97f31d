"""Real processes that are killed, stopped, hung or lost: who is named, with what, and that none outlives the timeout."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.dist.watch import LOST

SCRIPT = Path(__file__).parent / "faulty.py"
NUM_RANKS = 3


class Outcome:
    """Exit codes and stderr by rank."""

    def __init__(self, fault: str, victim: int, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), fault, str(victim), str(folder)],
                env=os.environ | shared | {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(NUM_RANKS)
        ]
        try:
            self.errors = [
                "" if rank == victim and fault == "stop" else process.communicate(timeout=60)[1]
                for rank, process in enumerate(processes)
            ]
            if fault == "stop" and victim > 0:
                processes[victim].wait(10)  # ended by the others
            self.codes = [process.returncode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stderr is not None
                process.stderr.close()
        self.reports = {
            rank: (folder / f"rank-{rank}.fault").read_text()
            for rank in range(NUM_RANKS)
            if (folder / f"rank-{rank}.fault").is_file()
        }

    def verdict(self, rank: int = 0) -> str:
        lines = [line for line in self.errors[rank].splitlines() if line.startswith("surefoot: ")]
        assert len(lines) == 1, self.errors
        return lines[0]


def test_a_run_without_a_fault_leaves_nothing(tmp_path: Path) -> None:
    outcome = Outcome("none", 0, tmp_path)
    assert outcome.codes == [0, 0, 0]
    assert outcome.reports == {}
    assert "surefoot:" not in "".join(outcome.errors)


def test_a_hung_rank_is_named_with_its_stack(tmp_path: Path) -> None:
    outcome = Outcome("hang", 1, tmp_path)
    assert outcome.codes == [LOST] * 3
    said = outcome.verdict()
    assert "rank 1 hung in step 5 (data)" in said
    assert "last in all_reduce #8 of all ranks" in said
    assert "the others wait in all_reduce #9 of all ranks" in said
    assert f"stack in {tmp_path / 'rank-1.fault'}" in said
    assert "in meet" in outcome.reports[1]
    assert "all_reduce" in outcome.reports[2]
    assert "surefoot:" not in outcome.errors[1] + outcome.errors[2]


@pytest.mark.long
def test_a_rank_that_holds_the_interpreter_lock_is_ended(tmp_path: Path) -> None:
    outcome = Outcome("lock", 1, tmp_path)
    assert outcome.codes[0] == outcome.codes[2] == LOST
    assert outcome.codes[1] in {1, -signal.SIGKILL}
    assert "rank 1 held the interpreter lock for longer than the timeout, last seen in step" in outcome.verdict()
    assert "in meet" in outcome.reports[1]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    outcome = Outcome("kill", 1, tmp_path)
    assert outcome.codes == [LOST, -signal.SIGKILL, LOST]
    assert "rank 1 is dead, last seen in step" in outcome.verdict()
    assert "all_reduce" in outcome.reports[0]


def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    outcome = Outcome("stop", 2, tmp_path)
    assert outcome.codes == [LOST, LOST, -signal.SIGKILL]
    assert "rank 2 is stopped (SIGSTOP), so it cannot show its stack, last seen in step" in outcome.verdict()
    assert "where this rank waited in" in outcome.verdict()


@pytest.mark.long
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_others_end_where_the_store_went_with_its_host(tmp_path: Path, fault: str) -> None:
    outcome = Outcome(fault, 0, tmp_path)
    assert outcome.codes[1:] == [LOST, LOST]
    assert "rank 0 is gone or stopped" in outcome.verdict(1)


def test_an_error_of_one_rank_is_told_by_the_others(tmp_path: Path) -> None:
    outcome = Outcome("error", 1, tmp_path)
    assert outcome.codes == [LOST, 1, LOST]
    assert "rank 1 failed in step 5 (data): no such sample" in outcome.verdict()
    assert "ValueError: no such sample" in outcome.errors[1]


@pytest.mark.long
def test_a_rank_in_another_collective_is_named(tmp_path: Path) -> None:
    outcome = Outcome("other", 1, tmp_path)
    assert set(outcome.codes) <= {LOST, -signal.SIGABRT}
    assert "rank 1" in outcome.verdict()


@pytest.mark.long
def test_a_rank_that_ends_too_early_is_named(tmp_path: Path) -> None:
    outcome = Outcome("end", 1, tmp_path)
    assert outcome.codes == [LOST, 0, LOST]
    assert "rank 1 ended the run while others go on" in outcome.verdict()
