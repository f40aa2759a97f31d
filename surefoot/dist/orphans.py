"""Processes that end with the one that started them, however that ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def follow(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when `parent` is gone (Linux alone can).

    To the kernel a parent is the thread that started a process: that must live as long.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it went before we asked
        os.kill(os.getpid(), number)
