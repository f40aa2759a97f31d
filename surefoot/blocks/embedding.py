"""Token embedding. Legend: B batch, L length, V vocabulary, D width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from surefoot.blocks.base import Block, Initial
from surefoot.ops.lookup import lookup


class Embedding(Block):
    """One vector a token id, times `scale`. `lookup` may be swapped for a parallel form."""

    def __init__(self, vocab_size: int, width: int, std: float, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = self.add_weight("weight", (vocab_size, width), ("vocab", "embed"), Initial(std=std))
        self.lookup: Callable[[Tensor, Tensor, torch.dtype], Tensor] = lookup

    def forward(self, tokens_BL: Tensor, dtype: torch.dtype) -> Tensor:
        """Ids (B, L) to vectors (B, L, D) in `dtype`, the dtype that all blocks after it compute in."""
        x_BLD = self.lookup(tokens_BL, self.weight, dtype)
        return x_BLD if self.scale == 1 else x_BLD * self.scale
