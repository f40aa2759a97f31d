"""Matrix products in the dtype asked for, on the fastest unit of this machine.

A bf16 product accumulated in fp32 is the same function whether a bf16 unit computes it or its operands are widened and
an fp32 GEMM does: widening is exact. x86 cores without AMX run the fp32 GEMM about twice as fast (300 against 165
GFLOP/s on two Sapphire Rapids cores), so there bf16 keeps its storage, its rounding and its traffic, and leaves the
multiplication to fp32. The choice depends on the machine alone, never on a measurement, so that a resumed run repeats it.
"""

from __future__ import annotations

import functools
import platform

import torch
from torch import Tensor


@functools.cache
def _cpu_widens_bf16() -> bool:
    is_x86 = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}
    return is_x86 and not torch.cpu._is_amx_tile_supported()


def widens_bf16(device: torch.device) -> bool:
    """Whether bf16 products on `device` run as fp32 GEMMs over widened operands."""
    return device.type == "cpu" and _cpu_widens_bf16()


def mm(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two matrices of one dtype, accumulated in at least fp32 and returned as `dtype`."""
    if left.dtype is torch.bfloat16 and widens_bf16(left.device):
        left, right = left.float(), right.float()
    return torch.mm(left, right).to(dtype)
