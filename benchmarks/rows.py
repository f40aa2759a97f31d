"""The workloads as numbers and rows of tokens. Needs numpy alone, so that no trainer pays for another's imports.

Legend: L positions.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Size:
    """A Llama-style decoder, the rows of a step and their length. A token is one byte of text, or two of a vocabulary of
    32,768."""

    width: int
    depth: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int = 1 << 15
    length: int = 256
    batch: int = 8

    @property
    def token_bytes(self) -> int:
        """Bytes of text that a token stands for."""
        return 1 if self.vocabulary == 1 << 8 else 2


SIZES = {
    "common": Size(256, 8, 8, 4, 768, vocabulary=1 << 8),
    "30m": Size(320, 8, 5, 5, 864),
    "110m": Size(768, 8, 12, 12, 2048),
}
COMMON = SIZES["common"]

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
def offsets(num_bytes: int) -> NDArray[np.int64]:
    """Where each row of so many bytes starts: drawn once, in order, by PCG64 with seed 0."""
    return np.random.Generator(np.random.PCG64(0)).integers(0, len(corpus()) - num_bytes, NUM_ROWS)


def rows(first: int, count: int, size: Size = COMMON) -> NDArray[np.int64]:
    """Rows first … first + count - 1: (count, L + 1) tokens; inputs are all but the last, targets all but the first."""
    num_bytes = (size.length + 1) * size.token_bytes
    text, starts = corpus(), offsets(num_bytes)
    indexes = [int(starts[number % NUM_ROWS]) for number in range(first, first + count)]
    read = np.stack([text[start : start + num_bytes] for start in indexes]).astype(np.int64)
    if size.token_bytes == 1:
        return read
    return (read[:, ::2] << 8 | read[:, 1::2]) % size.vocabulary
