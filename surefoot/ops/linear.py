"""Linear maps whose activations may be narrower than their weights.

Legend: N rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply, gradient_dtype, is_taped
from surefoot.ops.matmul import mm


class _Linear(torch.autograd.Function):
    """y = x Wᵀ in x's dtype over weights kept in another (fp32 masters); weight gradients return as
    wide as the widest weight wants them.

    The narrow copy of the weights lives only inside the call and is made again in backward: it costs 6 bytes of traffic
    a weight, and holding it would cost 2 bytes of memory a weight.
    """

    is_costly = True

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, *weights_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, *weights_OI)
        return mm(x_NI, _narrow(weights_OI, x_NI.dtype).t(), x_NI.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NO,) = grads
        x_NI, *weights_OI = ctx.saved_tensors
        grad_x = mm(grad_NO, _narrow(weights_OI, x_NI.dtype), x_NI.dtype) if ctx.needs_input_grad[0] else None
        grad_OI = mm(grad_NO.t(), x_NI, gradient_dtype(*weights_OI))
        return grad_x, *grad_OI.split([weight.shape[0] for weight in weights_OI])


def _narrow(weights_OI: list[Tensor] | tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    if len(weights_OI) == 1:
        return weights_OI[0].to(dtype)
    sizes = [weight.shape[0] for weight in weights_OI]
    narrow_OI = torch.empty((sum(sizes), weights_OI[0].shape[1]), dtype=dtype, device=weights_OI[0].device)
    for part, weight in zip(narrow_OI.split(sizes), weights_OI, strict=True):
        part.copy_(weight)
    return narrow_OI


def linear(x: Tensor, *weights_OI: Tensor) -> Tensor:
    """x (..., I) through one weight, or through several side by side, computed and returned in x's dtype (..., ΣO).

    Several weights that read the same input run as one larger GEMM. Gradients of the weights are in what
    those want (`grad_dtype`, a weight's own dtype unless set).
    """
    x_NI = x.reshape(-1, x.shape[-1])
    # The same products either way; only calls of `apply` can be kept for a second run.
    if weights_OI[0].dtype is x.dtype and x.dtype is not torch.bfloat16 and not is_taped():
        y_NO = F.linear(x_NI, weights_OI[0] if len(weights_OI) == 1 else torch.cat(weights_OI))
    else:
        y_NO = apply(_Linear, x_NI, *weights_OI)
    return y_NO.view(*x.shape[:-1], -1)


def linear_plain(x: Tensor, *weights_OI: Tensor) -> Tensor:
    """The reference of `linear`: one product a weight, by autograd, in x's dtype."""
    return torch.cat([torch.matmul(x, weight.to(x.dtype).t()) for weight in weights_OI], dim=-1)
