"""Processes of a pool end with the one that started them, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PARENT = """
import os, time
from surefoot.dist.pool import Pool

pool = Pool(2)
print(*pool.run(os.getpid), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_ranks_of_a_killed_pool_are_gone() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    ranks = [int(number) for number in parent.stdout.readline().split()]
    assert len(ranks) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while any(map(is_running, ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{number}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
