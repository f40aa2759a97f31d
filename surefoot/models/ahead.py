"""Predicting the token after the next as well, in training alone (DeepSeek-V3; DeepSeek-AI, 2024, section 2.2, one depth).

    h' = norm_out(layer(W [norm_h(h_i); norm_e(embedding(t_i+1))])), from which the model's own head predicts t_i+2

h is what the model's head reads, as in published code for DeepSeek-V3's weights (the paper has it before the final norm).

Legend: B batch, L length, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.blocks.base import Block, Initial
from surefoot.ops.documents import Documents
from surefoot.ops.loss import IGNORED


class Join(Block):
    """Two vectors of the width to one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = self.add_weight(
            "weight", (width, 2 * width), ("embed", "joined"), Initial(std=(2 * width) ** -0.5)
        )

    def forward(self, x_BLD: Tensor, y_BLD: Tensor) -> Tensor:
        """(B, L, D)."""
        return self.linear(torch.cat((x_BLD, y_BLD), -1), "weight")

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * self.weight.numel()


def following(tokens_BL: Tensor, targets_BL: Tensor, docs: Documents) -> tuple[Tensor, Tensor]:
    """The next tokens, and the targets after the next, both (B, L): ignored where they would lie in another document or beyond
    the end. What stands for a next token there is read by no position that predicts anything."""
    next_BL, after_BL = tokens_BL.roll(-1, 1), targets_BL.roll(-1, 1)
    after_BL[:, -1] = IGNORED
    if docs.ids_BL is not None:
        after_BL[:, :-1].masked_fill_(docs.ids_BL[:, 1:] != docs.ids_BL[:, :-1], IGNORED)
    return next_BL, after_BL
