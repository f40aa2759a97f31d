"""Start of a process: which device it uses, with how many threads, and what is known about both."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

# Options of mallopt(3).
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def choose_device(name: str) -> torch.device:
    """`auto` takes a CUDA device where there is one; of several ranks on a machine each takes its own.

    `ValueError` says why a device cannot be used.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError("no CUDA device is visible to PyTorch here; use auto or cpu")
    if name == "cuda" and (local := os.environ.get("LOCAL_RANK")) is not None:
        if int(local) >= torch.cuda.device_count():
            raise ValueError(
                f"there are {torch.cuda.device_count()} CUDA devices here and this is local rank {local}; start as many "
                "ranks on a machine as it has devices"
            )
        name = f"cuda:{local}"
    return torch.device(name)


def join(device: torch.device, timeout: timedelta) -> None:
    """Join the group of ranks that the environment describes (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    torchrun restarts ranks on the store of their earlier life, which still holds their old addresses: each life uses keys
    of its own.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # What the flight recorder keeps for a report of a fault; read when the first group is made.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = PrefixStore(f"life-{life}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def set_threads(num_threads: int | None) -> int:
    """Compute threads of this process: as asked, else OMP_NUM_THREADS, else one for each core it may run on."""
    if num_threads is None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        num_threads = int(os.environ.get("OMP_NUM_THREADS", available))
    torch.set_num_threads(num_threads)
    return num_threads


@functools.cache
def tune_allocator() -> str:
    """Let glibc keep what is freed and hand it out again; returns the allocator's name for the record.

    By default it maps every large tensor anew, and the kernel clears each of its pages: measured 10 to 15% of a CPU step.
    Another allocator, or settings of the user's own, are left alone.
    """
    preloaded = [name for name in ("tcmalloc", "jemalloc", "mimalloc") if name in os.environ.get("LD_PRELOAD", "")]
    if preloaded:
        return preloaded[0]
    if platform.libc_ver()[0] != "glibc":
        return "system"
    if any(name.startswith("MALLOC_") and name.endswith("_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ:
        return "glibc as the environment sets it"
    libc = ctypes.CDLL(None)
    settings = {_M_MMAP_THRESHOLD: 1 << 30, _M_TRIM_THRESHOLD: (1 << 31) - 1, _M_TOP_PAD: 1 << 26}
    taken = [libc.mallopt(option, value) for option, value in settings.items()]
    return "glibc, keeping freed memory" if all(taken) else "glibc"


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
        "allocator": tune_allocator(),
    }


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak so far: allocated on a CUDA device, resident for a CPU process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource  # noqa: PLC0415 - absent on Windows

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on a device: what the driver calls free and torch's allocator has left over; on a
    CPU its share of what the system (and its control group, where that says less) can hand out without swapping, as much for
    each rank on the machine. `ValueError` where the system does not say.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        system = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise ValueError("this system does not say how much memory is free; give bytes as in 512MiB") from None
    return min(system, *_left_in_groups(Path("/sys/fs/cgroup"))) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _left_in_groups(root: Path) -> list[int]:
    """What each control group (v2) around this process still allows; its files in memory that are not in use can go."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    own = next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")
    found = [1 << 63]
    for group in (root / own, *(root / own).parents):
        if not group.is_relative_to(root):
            break
        try:
            limit, used = ((group / f"memory.{name}").read_text(encoding="utf-8") for name in ("max", "current"))
            stat = (group / "memory.stat").read_text(encoding="utf-8").split()
        except OSError:
            continue
        if limit.strip() != "max":
            files = int(stat[stat.index("inactive_file") + 1])
            found.append(max(0, int(limit) - int(used) + files))
    return found


def _cpu_name() -> str:
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
