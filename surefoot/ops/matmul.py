"""Matrix products in the dtype asked for, on the fastest unit of this machine.

A bf16 product accumulated in fp32 is the same function whether a bf16 unit computes it or its operands are widened and
an fp32 GEMM does: widening is exact. Which is faster depends on the processor (GFLOP/s on two cores, 1024-cubed):

    Sapphire Rapids whose AMX is hidden   fp32 300   bf16 165   (AVX512_BF16 is there, at half the fp32 rate)
    AMD EPYC with AVX512_BF16             fp32 203   bf16 849

So on x86 without AMX, unless it is AMD's AVX512_BF16, bf16 keeps its storage, its rounding and its traffic, and leaves
the multiplication to fp32. The choice depends on the machine alone, never on a measurement, so that a resumed run
repeats it.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch
from torch import Tensor


@functools.cache
def _cpu_widens_bf16() -> bool:
    if platform.machine().lower() not in {"x86_64", "amd64", "i386", "i686"}:
        return False
    has_fast_bf16 = torch.cpu._is_amx_tile_supported() or (_is_amd() and torch.cpu._is_avx512_bf16_supported())
    return not has_fast_bf16


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "AuthenticAMD" in platform.processor()


def widens_bf16(device: torch.device) -> bool:
    """Whether bf16 products on `device` run as fp32 GEMMs over widened operands."""
    return device.type == "cpu" and _cpu_widens_bf16()


def mm(left: Tensor, right: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The product of two matrices of one dtype, accumulated in at least fp32 and returned as `dtype`, in `out` if given."""
    if left.dtype is torch.bfloat16 and widens_bf16(left.device):
        left, right = left.float(), right.float()
    if out is None:
        return torch.mm(left, right).to(dtype)
    return torch.mm(left, right, out=out) if out.dtype is left.dtype else out.copy_(torch.mm(left, right))
