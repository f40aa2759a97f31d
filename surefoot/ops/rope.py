"""Rotary position embedding (Su et al., 2021), in the half-split layout: component i turns with component i + K/2.

Legend: B batch, L length, H heads, K head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from surefoot.ops.autograd import apply
from surefoot.ops.native import calls


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BLHK, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, -1), None, None


def _turn(x_BLHK: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    if (found := calls.rotate(x_BLHK, cos, sin, direction)) is not None:
        return found
    wide = x_BLHK.to(cos.dtype)
    left, right = wide.chunk(2, -1)
    turned = torch.empty(wide.shape, dtype=cos.dtype, device=wide.device)
    turned_left, turned_right = turned.chunk(2, -1)
    torch.mul(left, cos, out=turned_left).addcmul_(right, sin, value=-direction)
    torch.mul(right, cos, out=turned_right).addcmul_(left, sin, value=direction)
    return turned.to(x_BLHK.dtype)


def rope_tables(positions: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer `positions` (L) or (B, L), shaped to broadcast over (B, L, H, K/2).

    Angles are computed in fp64: at position 100,000 an fp32 angle is already wrong in its third digit after the point.
    """
    half = torch.arange(0, head_size, 2, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64)[..., None] * theta ** (-half / head_size)
    return angles.cos().to(dtype)[..., None, :], angles.sin().to(dtype)[..., None, :]


def rotate(x_BLHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each head by its position's angles; computed in the tables' dtype, returned in x's."""
    y: Tensor = apply(_Rotate, x_BLHK, *tables)
    return y


def rotate_plain(x_BLHK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """The reference of `rotate`: a complex multiplication, by autograd."""
    left, right = x_BLHK.to(tables[0].dtype).chunk(2, -1)
    turned = torch.complex(left, right) * torch.complex(*tables)
    return torch.cat((turned.real, turned.imag), -1).to(x_BLHK.dtype)
