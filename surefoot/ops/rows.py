"""Moving rows: to where they are wanted, several times each, and back as weighted sums.

Neither direction adds into a row from several places at once, so results do not depend on an order of writing.

A copy may be missing: its row is R, one past the last. It takes nothing and gives nothing.

Legend: T tokens, K copies of each, R rows (T·K where none is missing), D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.ops.autograd import apply
from surefoot.ops.native import calls


class _CopyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, tokens_R: Tensor, rows_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_TK)
        return x_TD.index_select(0, tokens_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows_TK,) = ctx.saved_tensors
        return _sum(_padded(grads[0], rows_TK), rows_TK, None), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(x_RD, rows_TK, weights_TK)
        return _sum(_padded(x_RD, rows_TK), rows_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        x_RD, rows_TK, weights_TK = ctx.saved_tensors
        num_rows, x_RD = len(x_RD), _padded(x_RD, rows_TK)
        if (found := calls.spread_rows(x_RD, rows_TK, weights_TK, grads[0])) is not None:
            return found[0][:num_rows], None, found[1]
        wide_TD = grads[0].to(weights_TK.dtype)
        grad_x_RD, grad_TK = torch.empty_like(x_RD), torch.empty_like(weights_TK)
        for copy, (rows_T, weights_T) in enumerate(zip(rows_TK.unbind(1), weights_TK.unbind(1), strict=True)):
            grad_TK[:, copy] = (wide_TD * x_RD.index_select(0, rows_T)).sum(1)
            grad_x_RD[rows_T] = (wide_TD * weights_T[:, None]).to(x_RD.dtype)
        return grad_x_RD[:num_rows], None, grad_TK


def copy_rows(x_TD: Tensor, tokens_R: Tensor, rows_TK: Tensor) -> Tensor:
    """Row r is token `tokens_R[r]`'s (R, D); `rows_TK` is the inverse: where the copies of each token are."""
    x_RD: Tensor = apply(_CopyRows, x_TD, tokens_R, rows_TK)
    return x_RD


def sum_rows(x_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Σ_k weights[t, k] x[rows[t, k]], added in at least fp32 and returned in x's dtype (T, D).

    Each row belongs to one token: of the rows, `rows_TK` is a permutation. Weights are 0 where a copy is missing; they are
    fp32, or fp64 where x is.
    """
    y_TD: Tensor = apply(_SumRows, x_RD, rows_TK, weights_TK)
    return y_TD


def sum_rows_plain(x_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The reference of `sum_rows`, by autograd."""
    return (_padded(x_RD, rows_TK)[rows_TK].to(weights_TK.dtype) * weights_TK[..., None]).sum(1).to(x_RD.dtype)


def _padded(x_RD: Tensor, rows_TK: Tensor) -> Tensor:
    """With a row of zeros after the last, for copies that are missing, where some are."""
    return x_RD if len(x_RD) == rows_TK.numel() else torch.cat([x_RD, x_RD.new_zeros(1, x_RD.shape[1])])


def _sum(x_RD: Tensor, rows_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    if (found := calls.sum_rows(x_RD, rows_TK, weights_TK)) is not None:
        return found
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    y_TD = torch.zeros((rows_TK.shape[0], x_RD.shape[1]), dtype=wide, device=x_RD.device)
    for copy, rows_T in enumerate(rows_TK.unbind(1)):
        x_TD = x_RD.index_select(0, rows_T).to(wide)
        y_TD += x_TD if weights_TK is None else x_TD * weights_TK[:, copy, None]
    return y_TD.to(x_RD.dtype)
