"""Token embedding. Legend: B batch, L length, V vocabulary, D width."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Block, Initial


class Embedding(Block):
    """One vector a token id."""

    def __init__(self, vocab_size: int, width: int, std: float) -> None:
        super().__init__()
        self.weight = self.add_weight("weight", (vocab_size, width), ("vocab", "embed"), Initial(std=std))

    def forward(self, tokens_BL: Tensor, dtype: torch.dtype) -> Tensor:
        """Ids (B, L) to vectors (B, L, D) in `dtype`, the dtype that all blocks after it compute in."""
        return F.embedding(tokens_BL, self.weight).to(dtype)
