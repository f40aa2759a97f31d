"""Normalisation. Legend: D width."""

from __future__ import annotations

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
