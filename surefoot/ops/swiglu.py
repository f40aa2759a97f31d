"""The gate of a SwiGLU feed-forward network (Shazeer, 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply
from surefoot.ops.native import calls


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up; the activated gate is made again in backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        y = calls.swiglu_forward(gate, up)
        return F.silu(gate).mul_(up) if y is None else y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if (found := calls.swiglu_backward(gate, up, grads[0])) is not None:
            return found
        grad_gate = grads[0] * up
        torch.ops.aten.silu_backward(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grads[0])


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, elementwise."""
    y: Tensor = apply(_SwiGLU, gate, up)
    return y


def swiglu_plain(gate: Tensor, up: Tensor) -> Tensor:
    """The reference of `swiglu`, by autograd."""
    return gate * torch.sigmoid(gate) * up
