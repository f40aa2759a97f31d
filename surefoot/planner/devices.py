"""What accelerators can do at most, by the numbers their makers publish."""

from __future__ import annotations

import re
from dataclasses import dataclass

from surefoot.config import ConfigError

UNITS = {
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


@dataclass(frozen=True)
class Device:
    """Memory in bytes as the driver reports it, rounded down; dense bf16 FLOP/s; bytes/s from memory."""

    name: str
    memory: int
    flops: float
    bandwidth: float

    def times(self, count: int) -> Device:
        """So many of them as one: what they send each other is left out."""
        if count == 1:
            return self
        return Device(f"{count} x {self.name}", self.memory * count, self.flops * count, self.bandwidth * count)


_GIB = UNITS["GiB"]

DEVICES = {
    device.name: device
    for device in (
        Device("a100", 79 * _GIB, 312e12, 2.039e12),  # NVIDIA A100 80GB SXM data sheet
        Device("h100", 79 * _GIB, 989e12, 3.35e12),  # NVIDIA H100 SXM data sheet
        Device("h200", 139 * _GIB, 989e12, 4.8e12),  # NVIDIA H200 data sheet
        Device("b200", 178 * _GIB, 2250e12, 8.0e12),  # NVIDIA DGX B200 data sheet, an eighth of it
        Device("l40s", 44 * _GIB, 362e12, 0.864e12),  # NVIDIA L40S data sheet
        Device("mi300x", 191 * _GIB, 1307e12, 5.3e12),  # AMD Instinct MI300X data sheet
    )
}


def parse_device(text: str) -> Device:
    """A name of `DEVICES`, or one's own as `80GiB,989e12,3.35e12`: memory, dense bf16 FLOP/s, bytes/s."""
    if (known := DEVICES.get(text.lower())) is not None:
        return known
    parts = text.split(",")
    try:
        memory, flops, bandwidth = parts
        own = Device(text, parse_size(memory), float(flops), float(bandwidth))
    except ValueError:
        own = None
    if own is None or not (0 < own.flops < float("inf") and 0 < own.bandwidth < float("inf")):
        raise ConfigError(
            "--device",
            text,
            f"is none of {', '.join(DEVICES)}; describe another as memory,FLOP/s,bytes/s, as in 80GiB,989e12,3.35e12",
        )
    return own


def parse_size(text: str) -> int:
    """`80GiB` or `80GB` in bytes; `ValueError` for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kKMGT]i?B)", text)
    if found is None or found[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size like 80GiB")
    return int(float(found[1]) * UNITS[found[2]])
