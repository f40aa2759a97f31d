"""Grouped matrix products: rows sorted by group, each group through a matrix of its own.

Groups may be of any size, also empty. Legend: R rows, E groups (experts), I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply, gradient_dtype
from surefoot.ops.matmul import mm


class _GroupedLinear(torch.autograd.Function):
    """Each group's y = x Wᵀ in x's dtype; as in `ops.linear`, weights may be wider and narrow copies do not outlive a call."""

    is_costly = True

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, counts_E, weight_EOI)
        return products(x_RI, weight_EOI.mT, counts_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        x_RI, counts_E, weight_EOI = ctx.saved_tensors
        grad_RO = grads[0].contiguous()
        grad_x_RI = products(grad_RO, weight_EOI, counts_E) if ctx.needs_input_grad[0] else None
        grad_EOI = outer_products(grad_RO, x_RI, counts_E, weight_EOI) if ctx.needs_input_grad[2] else None
        return grad_x_RI, None, grad_EOI


def grouped_linear(x_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Rows (R, I) through their group's weight, in x's dtype (R, O); the first `counts_E[0]` rows are group 0's, and so on.

    The counts add up to R. The weight's gradient is in what it wants (`grad_dtype`).
    """
    y_RO: Tensor = apply(_GroupedLinear, x_RI, counts_E, weight_EOI)
    return y_RO


def grouped_linear_plain(x_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """The reference of `grouped_linear`: one product a group, by autograd, in x's dtype."""
    parts = x_RI.split(counts_E.tolist())
    return torch.cat(
        [torch.matmul(part, weight.to(x_RI.dtype).t()) for part, weight in zip(parts, weight_EOI, strict=True)]
    )


def products(x_RI: Tensor, matrix_EIO: Tensor, counts_E: Tensor) -> Tensor:
    """Each group of rows times its matrix."""
    if _has_kernel(x_RI, matrix_EIO):
        return F.grouped_mm(x_RI, matrix_EIO.to(x_RI.dtype), offs=_ends(counts_E))
    sizes = sizes_of(counts_E, x_RI.shape[0])
    y_RO = x_RI.new_empty((x_RI.shape[0], matrix_EIO.shape[2]))
    for x, matrix, y in zip(x_RI.split(sizes), matrix_EIO, y_RO.split(sizes), strict=True):
        if len(x):
            mm(x, matrix.to(x.dtype), x.dtype, out=y)
    return y_RO


def outer_products(grad_RO: Tensor, x_RI: Tensor, counts_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Each group's gᵀ x, shaped like the weight, in what its gradient is wanted in; zero where a group is empty."""
    if _has_kernel(x_RI, weight_EOI):
        return F.grouped_mm(grad_RO.t(), x_RI, offs=_ends(counts_E)).to(gradient_dtype(weight_EOI))
    sizes = sizes_of(counts_E, x_RI.shape[0])
    grad_EOI = torch.empty_like(weight_EOI, dtype=gradient_dtype(weight_EOI))
    for grad, x, out in zip(grad_RO.split(sizes), x_RI.split(sizes), grad_EOI, strict=True):
        if len(x):
            mm(grad.t(), x, out.dtype, out=out)
        else:
            out.zero_()
    return grad_EOI


def sizes_of(counts_E: Tensor, num_rows: int) -> list[int]:
    """The counts as numbers; on meta, where nobody knows them, `num_rows` shared out as evenly as can be."""
    if counts_E.is_meta:
        each, rest = divmod(num_rows, counts_E.numel())
        return [each + (number < rest) for number in range(counts_E.numel())]
    sizes: list[int] = counts_E.tolist()
    return sizes


def _has_kernel(x_RI: Tensor, matrix_EIO: Tensor) -> bool:
    """Whether torch has one kernel for all groups that needs no counts on the host; a CPU's is the loop, only slower.

    It reads bf16 whose rows start at multiples of 16 bytes.
    """
    is_aligned = all(size % 8 == 0 for size in matrix_EIO.shape[1:])
    return x_RI.device.type == "cuda" and x_RI.dtype is torch.bfloat16 and is_aligned


def _ends(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0, dtype=torch.int32)
