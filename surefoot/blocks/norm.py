"""Normalisation. Legend: D width."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.blocks.base import Block, Initial
from surefoot.ops.norm import rms_norm


class RMSNorm(Block):
    """Root-mean-square norm (Zhang and Sennrich, 2019) with a learned scale that starts at 1."""

    def __init__(self, width: int, eps: float, axis: str = "embed") -> None:
        super().__init__()
        self.eps = eps
        self.scale = self.add_weight("scale", (width,), (axis,), Initial(mean=1.0))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D) in x's dtype."""
        return rms_norm(x, self.scale, self.eps)


class GroupNorm(Block):
    """Root-mean-square norm of runs of `size` entries, each by itself, with one learned scale an entry that starts at 1."""

    def __init__(self, width: int, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.units = {"norm_heads": size}
        self.scale = self.add_weight("scale", (width,), ("norm_heads",), Initial(mean=1.0))

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width) in x's dtype; the mean and the scale in at least fp32."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        groups: Tensor = wide.unflatten(-1, (-1, self.size))
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (normed.flatten(-2) * self.scale.to(wide.dtype)).to(x.dtype)
