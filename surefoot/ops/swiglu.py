"""The gate of a SwiGLU feed-forward network (Shazeer, 2020). Legend: F hidden width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.ops.autograd import apply


class _SwiGLU(torch.autograd.Function):
    """Keeps the input; the activated gate is made again in backward. The gradient is written where it belongs."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(F.silu(gate), grads[0], out=grad_up)
        torch.ops.aten.silu_backward(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of gate and up side by side: (..., 2F) to (..., F)."""
    y: Tensor = apply(_SwiGLU, gate_up)
    return y


def swiglu_plain(gate_up: Tensor) -> Tensor:
    """The reference of `swiglu`, by autograd."""
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up
