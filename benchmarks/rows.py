"""The common workload as numbers and rows of bytes. Needs numpy alone, so that no trainer pays for another's imports.

Legend: L positions.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WIDTH, DEPTH, HEADS, KV_HEADS, FFN, VOCABULARY = 256, 8, 8, 4, 768, 256
LENGTH, BATCH = 256, 8
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP, WARMUP_STEPS = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0, 5
NORM_EPS, ROPE_THETA = 1e-5, 10_000.0
NUM_ROWS = 1 << 18


@functools.cache
def corpus() -> NDArray[np.uint8]:
    """Every .py file of the standard library, by sorted path, end to end."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in {"site-packages", "__pycache__"}]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return np.frombuffer(b"".join(file.read_bytes() for file in sorted(files, key=str)), np.uint8)


@functools.cache
def offsets() -> NDArray[np.int64]:
    """Where each row starts: drawn once, in order, by PCG64 with seed 0."""
    return np.random.Generator(np.random.PCG64(0)).integers(0, len(corpus()) - LENGTH - 1, NUM_ROWS)


def rows(first: int, count: int) -> NDArray[np.int64]:
    """Rows first … first + count - 1: (count, L + 1) bytes; inputs are all but the last, targets all but the first."""
    text, starts = corpus(), offsets()
    indexes = [int(starts[number % NUM_ROWS]) for number in range(first, first + count)]
    return np.stack([text[start : start + LENGTH + 1] for start in indexes]).astype(np.int64)
