"""Root-mean-square normalisation (Zhang and Sennrich, 2019), statistics in at least fp32.

Legend: D normalised width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.ops.autograd import apply
from surefoot.ops.native import calls


class _RMSNorm(torch.autograd.Function):
    """Saves the input and one number a row; the normalised tensor is made again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        if (found := calls.rms_norm_forward(x, weight_D, eps)) is not None:
            ctx.save_for_backward(x, found[1], weight_D)
            return found[0]
        wide = x.float()
        size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, weight_D)
        y = (wide.mul_(inverse) if wide is not x else wide * inverse).to(x.dtype)
        return y.mul_(weight_D.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, inverse, weight_D = ctx.saved_tensors
        if (found := calls.rms_norm_backward(x, weight_D, inverse, grad)) is not None:
            return *found, None
        unit = x.float() * inverse
        wide_grad, wide_weight_D = grad.float(), weight_D.float()
        product = wide_grad * unit
        grad_weight = product.flatten(0, -2).sum(0)
        along = (product @ wide_weight_D).div_(x.shape[-1])[..., None]
        grad_x = (wide_grad * wide_weight_D).addcmul_(unit, along, value=-1).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight_D.dtype), None


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x (..., D) divided by the root of its mean square plus `eps`, times `weight_D`, in x's dtype."""
    if x.dtype is torch.float64:
        return rms_norm_plain(x, weight_D, eps)
    y: Tensor = apply(_RMSNorm, x, weight_D, eps)
    return y


def rms_norm_plain(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The reference of `rms_norm`, by autograd."""
    wide = x if x.dtype is torch.float64 else x.float()
    unit = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (unit.to(x.dtype) * weight_D.to(x.dtype)).to(x.dtype)
