"""Parts of native sparse attention (Yuan et al., 2025) with weights of their own.

Legend: B batch, L length, D width, H query heads, G key-value heads, K head size, N compressed blocks, C tokens in one,
X branches.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Block, Initial

Branch = Literal["compressed", "selected", "window"]
BRANCHES: tuple[Branch, ...] = ("compressed", "selected", "window")


class Compression(Block):
    """C tokens' keys (or values) of a head to one: a position is added to each, then two layers see all of them.

    All heads have the same, so that heads can be shared out.
    """

    def __init__(self, size: int, head_size: int) -> None:
        super().__init__()
        fan_in = size * head_size
        self.position = self.add_weight("position", (size, head_size), ("taps", "head"), Initial(std=0.02))
        self.w_in = self.add_weight("w_in", (head_size, fan_in), ("latent", "head"), Initial(std=fan_in**-0.5))
        self.w_out = self.add_weight("w_out", (head_size, head_size), ("head", "latent"), Initial(std=head_size**-0.5))

    def forward(self, x_BNCGK: Tensor) -> Tensor:
        """(B, N, C, G, K) to (B, N, G, K)."""
        placed = x_BNCGK + self.position.to(x_BNCGK.dtype)[:, None]
        return self.linear(F.gelu(self.linear(placed.transpose(2, 3).flatten(3), "w_in")), "w_out")

    def flops(self) -> float:
        """Forward FLOPs of one block of one head."""
        return 2.0 * (self.w_in.numel() + self.w_out.numel())


class Gates(Block):
    """How much of each branch each head takes, between 0 and 1."""

    def __init__(self, num_heads: int, width: int) -> None:
        super().__init__()
        self.units = {"heads": len(BRANCHES)}
        shape = (num_heads * len(BRANCHES), width)
        self.weight = self.add_weight("weight", shape, ("heads", "embed"), Initial(std=width**-0.5))

    def forward(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, L, H, 1) for each branch."""
        gates_BLHX: Tensor = self.linear(x_BLD, "weight").sigmoid().unflatten(-1, (-1, len(BRANCHES)))
        return gates_BLHX[..., 0:1], gates_BLHX[..., 1:2], gates_BLHX[..., 2:3]
