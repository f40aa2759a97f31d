"""One rank of a group that sums every 20 ms and meets a fault in step 5: `faulty.py FAULT VICTIM FOLDER`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.startup import join
from surefoot.dist.watch import MARGIN, Watch

TIMEOUT = 2.0


def meet(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "hang":
        time.sleep(100)
    elif fault == "lock":
        ctypes.PyDLL(None).sleep(100)  # holds the interpreter lock
    elif fault == "error":
        raise ValueError("no such sample")
    elif fault == "other":
        dist.broadcast(torch.ones(4), 0)  # while the others sum twice
    elif fault == "end":
        sys.exit(0)


def main(fault: str, victim: int, folder: Path) -> None:
    join(torch.device("cpu"), timedelta(seconds=TIMEOUT + MARGIN))
    heartbeat = Heartbeat()
    with Watch(heartbeat, TIMEOUT, folder / f"rank-{dist.get_rank()}.fault"):
        for step in range(1, 9):
            heartbeat.enter("data", step)
            if step == 5 and dist.get_rank() == victim:
                meet(fault)
            heartbeat.enter("forward-backward")
            for _ in range(2):
                dist.all_reduce(torch.ones(4))
            time.sleep(0.02)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
