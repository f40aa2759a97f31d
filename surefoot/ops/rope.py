"""Rotary position embedding (Su et al., 2021) of the first R components of each head, R = 2 · frequencies.

Two layouts: `half`, where component i turns with component i + R/2, and `interleaved`, where 2i turns with 2i + 1.

Legend: B batch, L length, H heads, K head size, F = R/2 frequencies.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from surefoot.ops.autograd import apply
from surefoot.ops.native import calls

Layout = Literal["half", "interleaved"]


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back, so nothing but the tables is kept."""

    @staticmethod
    def forward(ctx: Any, x_BLHK: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        return _turn(x_BLHK, cos, sin, layout, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, ctx.layout, -1), None, None, None


def _turn(x_BLHK: Tensor, cos: Tensor, sin: Tensor, layout: Layout, direction: int) -> Tensor:
    size = 2 * cos.shape[-1]
    is_native = layout == "half" and size == x_BLHK.shape[-1]
    if is_native and (found := calls.rotate(x_BLHK, cos, sin, direction)) is not None:
        return found
    wide = x_BLHK.to(cos.dtype)
    turned = torch.empty(wide.shape, dtype=cos.dtype, device=wide.device)
    turned[..., size:] = wide[..., size:]
    (left, right), (turned_left, turned_right) = (_pairs(x[..., :size], layout) for x in (wide, turned))
    torch.mul(left, cos, out=turned_left).addcmul_(right, sin, value=-direction)
    torch.mul(right, cos, out=turned_right).addcmul_(left, sin, value=direction)
    return turned.to(x_BLHK.dtype)


def _pairs(x_BLHR: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Views of the two components of each pair."""
    if layout == "interleaved":
        return x_BLHR[..., 0::2], x_BLHR[..., 1::2]
    left, right = x_BLHR.chunk(2, -1)
    return left, right


def frequencies(size: int, theta: float) -> Tensor:
    """Radians a position of each of `size` / 2 pairs, in fp64."""
    return theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)


def llama3_frequencies(
    plain_F: Tensor, *, factor: float, original_length: int, low_factor: float, high_factor: float
) -> Tensor:
    """Wavelengths over original_length / low_factor are stretched by `factor`, those under original_length / high_factor
    stay, between them the two are mixed (Dubey et al., 2024, as published with the weights of Llama 3.1)."""
    turns_F = original_length * plain_F / (2 * math.pi)
    share_F = ((turns_F - low_factor) / (high_factor - low_factor)).clamp(0, 1)
    return plain_F * (share_F + (1 - share_F) / factor)


def yarn_frequencies(
    plain_F: Tensor,
    *,
    theta: float,
    factor: float,
    original_length: int,
    fast_turns: float,
    slow_turns: float,
    bounds: Literal["whole", "exact"],
) -> Tensor:
    """Pairs that turn more than `fast_turns` times in original_length stay, those that turn less than `slow_turns` times are
    stretched by `factor`, with a ramp over the pairs' numbers between (Peng et al., 2023). Its ends may be rounded outwards.
    """
    size = 2 * len(plain_F)

    def number(turns: float) -> float:
        return size * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = number(fast_turns), number(slow_turns)
    if bounds == "whole":
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    ramp_F = (torch.arange(len(plain_F), dtype=torch.float64) - low) / max(high - low, 1e-3)
    stretched_F = ramp_F.clamp(0, 1)
    return plain_F * (1 - stretched_F + stretched_F / factor)


def rope_tables(
    positions: Tensor, frequencies_F: Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer `positions` (L) or (B, L), shaped to broadcast over (B, L, H, F), times `amplitude`.

    Angles are computed in fp64: at position 100,000 an fp32 angle is already wrong in its third digit after the point.
    """
    angles = positions.to(torch.float64)[..., None] * frequencies_F.to(positions.device)
    cos, sin = ((turn(angles) * amplitude).to(dtype)[..., None, :] for turn in (torch.cos, torch.sin))
    return cos, sin


def rotate(x_BLHK: Tensor, tables: tuple[Tensor, Tensor], layout: Layout = "half") -> Tensor:
    """Turn each head by its position's angles; computed in the tables' dtype, returned in x's."""
    y: Tensor = apply(_Rotate, x_BLHK, *tables, layout)
    return y


def rotate_plain(x_BLHK: Tensor, tables: tuple[Tensor, Tensor], layout: Layout = "half") -> Tensor:
    """The reference of `rotate`: a complex multiplication, by autograd."""
    size = 2 * tables[0].shape[-1]
    turning, rest = x_BLHK[..., :size], x_BLHK[..., size:]
    pairs = turning.unflatten(-1, (-1, 2)) if layout == "interleaved" else turning.unflatten(-1, (2, -1)).mT
    turned = torch.view_as_complex(pairs.to(tables[0].dtype).contiguous()) * torch.complex(*tables)
    both = torch.view_as_real(turned)
    y = both.flatten(-2) if layout == "interleaved" else both.mT.flatten(-2)
    return torch.cat((y.to(x_BLHK.dtype), rest), -1)
