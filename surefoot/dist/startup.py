"""Start of a process: which device it uses, with how many threads, and what is known about both."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA device where there is one. `ValueError` says why a named device cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA device is visible to PyTorch here; use auto or cpu")
    return torch.device(name)


def set_threads(num_threads: int | None) -> int:
    """Compute threads of this process: as asked, else OMP_NUM_THREADS, else one for each core it may run on."""
    if num_threads is None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = int(os.environ.get("OMP_NUM_THREADS", available))
    torch.set_num_threads(num_threads)
    return num_threads


def describe_device(device: torch.device) -> dict[str, Any]:
    """Facts about the device for the record."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"kind": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    return {
        "kind": device.type,
        "name": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: allocated on a CUDA device, resident for a CPU process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource  # noqa: PLC0415 - absent on Windows

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
