"""Gradient clipping by the norm over all logical parameters, each counted once.

torch's own `clip_grad_norm_` multiplies whether it has to or not, and fails where parameters live on different meshes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from surefoot.dist.collectives import sum_
from surefoot.optim.base import Param


@torch.no_grad()
def gradient_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm of all entries, 0-d, in fp64 where a gradient is and otherwise fp32; 0 of nothing."""
    if not gradients:
        return torch.zeros(())
    dtype = torch.float64 if any(gradient.dtype is torch.float64 for gradient in gradients) else torch.float32
    norms: Sequence[Tensor] = torch._foreach_norm(list(gradients), 2, dtype)
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]))
    return total


@torch.no_grad()
def global_norm(params: Sequence[Param], group: ProcessGroup | None) -> Tensor:
    """The norm over the logical parameters: of each entry, the one copy that counts; equal bits on every rank."""
    counted = [param.tensor.grad for param in params if param.counts]
    norm = gradient_norm([gradient for gradient in counted if gradient is not None])
    if group is None:
        return norm
    # Squares are summed in fp64: a rank whose part is small must not vanish beside the others. The dtype of the result
    # follows the parameters, not what this rank happened to count, or ranks would round differently.
    is_double = any(param.tensor.dtype is torch.float64 for param in params)
    total = norm.to(params[0].tensor.device, torch.float64).square().reshape(1)
    return sum_(total, group).sqrt()[0].to(torch.float64 if is_double else torch.float32)


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> float:
    """Scale `gradients`, whose norm is `norm`, in place so that it is at most `max_norm`; returns the coefficient.

    A norm that is NaN or infinite scales nothing and returns 1: there is no direction to keep, and the evidence stays.
    Reading the norm waits for the device.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm {max_norm} is not positive")
    value = norm.item()
    if not math.isfinite(value) or value <= max_norm:
        return 1.0
    coefficient = max_norm / value
    torch._foreach_mul_(list(gradients), coefficient)
    return coefficient
