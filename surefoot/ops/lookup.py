"""Rows of a matrix by their numbers.

Legend: B batch, L length, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply, gradient_dtype


class _Lookup(torch.autograd.Function):
    """Adds up gradients of rows in what the weight wants them in: a row of a common token is added to thousands of times."""

    @staticmethod
    def forward(ctx: Any, tokens_BL: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens_BL)
        ctx.num_rows, ctx.dtype = weight_VD.shape[0], gradient_dtype(weight_VD)
        return F.embedding(tokens_BL, weight_VD).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        (tokens_BL,) = ctx.saved_tensors
        wide = grads[0].to(ctx.dtype)
        grad_VD: Tensor = torch.ops.aten.embedding_dense_backward(wide, tokens_BL, ctx.num_rows, -1, False)
        return None, grad_VD, None


def lookup(tokens_BL: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of the ids (B, L) in `dtype`, (B, L, D)."""
    if gradient_dtype(weight_VD) is weight_VD.dtype:
        return F.embedding(tokens_BL, weight_VD).to(dtype)
    x_BLD: Tensor = apply(_Lookup, tokens_BL, weight_VD, dtype)
    return x_BLD
