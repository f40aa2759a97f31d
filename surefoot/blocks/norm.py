"""Normalisation. Legend: D width, B batch, L length, H heads, K head size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Block, Initial
from surefoot.ops.norm import rms_norm


class RMSNorm(Block):
    """Root-mean-square norm (Zhang and Sennrich, 2019) with a learned scale that starts at 1.

    With an `offset` the weight is what is added to it, as in Gemma: decay of weights then pulls scales there.
    """

    def __init__(self, width: int, eps: float, axis: str = "embed", *, offset: int = 0) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.scale = self.add_weight("scale", (width,), (axis,), Initial(mean=1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D) in x's dtype."""
        scale: Tensor = self.scale
        if self.offset:  # added in fp32: narrow weights around 1 would lose their last digits
            scale = scale.to(torch.promote_types(scale.dtype, torch.float32)) + self.offset
        return rms_norm(x, scale, self.eps)


def own_sums(sums: Tensor) -> Tensor:
    """The sums themselves: no other process holds heads of the same tokens."""
    return sums


class HeadsNorm(Block):
    """Root-mean-square norm over all heads of a token together, as in OLMo 2 (OLMo team, 2025).

    `pool` turns this process's sums of squares (B, L, 1) into those of all processes that hold other heads of the same
    tokens; it may be swapped for a sum over them.
    """

    def __init__(self, num_heads: int, head_size: int, eps: float, axis: str) -> None:
        super().__init__()
        self.eps, self.width, self.units = eps, num_heads * head_size, {axis: head_size}
        self.pool: Callable[[Tensor], Tensor] = own_sums
        self.scale = self.add_weight("scale", (self.width,), (axis,), Initial(mean=1.0))

    def forward(self, x_BLHK: Tensor) -> Tensor:
        """(B, L, H, K) to the same in x's dtype, statistics in at least fp32."""
        wide = x_BLHK.flatten(2).to(torch.promote_types(x_BLHK.dtype, torch.float32))
        mean_BL1 = self.pool(wide.square().sum(-1, keepdim=True)) / self.width
        unit = (wide * (mean_BL1 + self.eps).rsqrt()).to(x_BLHK.dtype)
        return (unit * self.scale.to(x_BLHK.dtype)).view(x_BLHK.shape)


class LayerNorm(Block):
    """Normalisation to mean 0 and variance 1 (Ba et al., 2016), with a learned scale that starts at 1 and a bias at 0."""

    def __init__(self, width: int, eps: float, axis: str = "embed") -> None:
        super().__init__()
        self.eps = eps
        self.scale = self.add_weight("scale", (width,), (axis,), Initial(mean=1.0))
        self.bias = self.add_weight("bias", (width,), (axis,), Initial())

    def forward(self, x: Tensor) -> Tensor:
        """(..., D) to (..., D) in x's dtype, statistics in at least fp32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), x.shape[-1:], self.scale.to(wide), self.bias.to(wide), self.eps).to(x.dtype)


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
