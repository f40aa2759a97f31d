"""Processes of a pool end with the one that started them, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.running import is_running

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
