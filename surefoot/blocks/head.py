"""The output head: hidden states to logits or straight to the loss.

Legend: B batch, L length, T = B·L tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from surefoot.blocks.base import Block, Initial
from surefoot.ops.linear import linear
from surefoot.ops.loss import LossSums, linear_cross_entropy

Objective = Callable[[Tensor, Tensor, Tensor, float, float | None], tuple[Tensor, LossSums]]


def objective(
    x_BLD: Tensor, weight_VD: Tensor, targets_BL: Tensor, z_weight: float, softcap: float | None
) -> tuple[Tensor, LossSums]:
    """`linear_cross_entropy` of a batch."""
    return linear_cross_entropy(x_BLD.flatten(0, 1), weight_VD, targets_BL.flatten(), z_weight, softcap=softcap)


class Head(Block):
    """A linear map onto the vocabulary, with a weight of its own or the embedding's (tied).

    Logits are multiplied by `scale` and then, where there is a `softcap` c, become c tanh(logits / c).

    `objective` may be swapped for a parallel form.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int,
        z_loss: float,
        tied: nn.Parameter | None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.z_loss, self.scale, self.softcap = z_loss, scale, softcap
        self.objective: Objective = objective
        if tied is None:
            self.weight = self.add_weight("weight", (vocab_size, width), ("vocab", "embed"), Initial(std=width**-0.5))
        else:
            self.register_parameter("weight", tied)  # the owner names its axes

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states (..., D) to logits (..., V)."""
        logits = linear(self._scaled(x), self.weight)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def loss(self, x_BLD: Tensor, targets_BL: Tensor) -> tuple[Tensor, LossSums]:
        """Summed cross-entropy plus the weighted z term, and both sums for the record."""
        return self.objective(self._scaled(x_BLD), self.weight, targets_BL, self.z_loss, self.softcap)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x * self.scale

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * self.weight.numel()
