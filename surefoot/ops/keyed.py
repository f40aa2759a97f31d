"""Numbers that look random and are functions of what they are for: no generator, no order, the same on every process.

The integers are those of SplitMix64 (Steele et al., 2014), chained over the parts of a key.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def keyed(*parts: int | Tensor, device: torch.device | None = None) -> Tensor:
    """64 bits for each key (as int64): its parts are whole numbers, or tensors of them that broadcast."""
    bits = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        bits = _mixed(bits + part + _STEP)
    return bits


def uniform(bits: Tensor) -> Tensor:
    """In fp64, between 0 and 1 and never either."""
    return (_shifted(bits, 11).double() + 0.5) * 2.0**-53


def normal(bits: Tensor) -> Tensor:
    """In fp64, of mean 0 and variance 1."""
    return torch.erfinv(2 * uniform(bits) - 1) * math.sqrt(2)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in, as of an unsigned number."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
