"""The launcher names what failed: which rank, how, and where that was in its run."""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.dist.launch import run_ranks
from surefoot.dist.watch import LOST

PREAMBLE = """
import os, signal, sys, time
from surefoot.dist.launch import environment_rank, start_heartbeat
rank, world = environment_rank()
heartbeat = start_heartbeat(rank)
heartbeat.enter("data", 1)
heartbeat.enter("save", 4)
heartbeat.enter("evaluate")
"""


def launch(body: str, folder: Path, num_ranks: int = 2) -> tuple[int, list[str]]:
    said: list[str] = []
    code = run_ranks([sys.executable, "-c", PREAMBLE + body], num_ranks, folder / "logs", said.append)
    return code, said


def test_ranks_that_end_well_say_nothing(tmp_path: Path) -> None:
    assert launch("", tmp_path) == (0, [])


def test_a_signal_is_named_with_the_place_of_the_rank(tmp_path: Path) -> None:
    code, said = launch("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert code == 128 + 9
    assert said == [
        f"rank 1 was ended by SIGKILL in step 4 (evaluate); {tmp_path / 'logs' / 'rank-1.log'} is empty",
    ]


def test_an_exit_code_is_named_with_the_last_line_of_the_log(tmp_path: Path) -> None:
    code, said = launch("if rank == 1: heartbeat.enter('data', 5); sys.exit('no such file')", tmp_path)
    assert code == 1
    assert said[0].startswith("rank 1 ended with exit code 1 in step 5 (data); ")
    assert said[0].endswith("ends with: no such file")


def test_a_rank_that_the_others_lost_is_ended_soon(tmp_path: Path) -> None:
    code, said = launch(f"sys.exit({LOST}) if rank == 1 else time.sleep(1000)", tmp_path)
    assert code == LOST
    assert said[0].startswith(f"rank 1 ended with exit code {LOST} in step 4 (evaluate); rank 0, still in step 4")


def test_a_rank_that_never_began_is_at_its_start(tmp_path: Path) -> None:
    said: list[str] = []
    assert run_ranks([sys.executable, "-c", "raise SystemExit(3)"], 1, tmp_path / "logs", said.append) == 3
    assert said == ["rank 0 ended with exit code 3 in its start"]
