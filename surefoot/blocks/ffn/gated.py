"""What gated feed-forward networks share. Legend: B batch, L length, D width, F hidden width."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from surefoot.blocks.base import FeedForward, Initial


class Gated(FeedForward):
    """gate(x Wg, x Wu) Wd (Shazeer, 2020)."""

    def __init__(self, hidden: int, width: int, output_scale: float) -> None:
        super().__init__()
        fan_in = Initial(std=width**-0.5)
        self.w_gate = self.add_weight("w_gate", (hidden, width), ("ffn", "embed"), fan_in)
        self.w_up = self.add_weight("w_up", (hidden, width), ("ffn", "embed"), fan_in)
        self.w_down = self.add_weight(
            "w_down", (width, hidden), ("embed", "ffn"), Initial(std=output_scale * hidden**-0.5)
        )

    @abstractmethod
    def gate(self, gate_BLF: Tensor, up_BLF: Tensor) -> Tensor:
        """The hidden units, elementwise."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        h_BLF = self.gate(self.linear(x_BLD, "w_gate"), self.linear(x_BLD, "w_up"))
        return self.linear(h_BLF, "w_down")

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * (self.w_gate.numel() + self.w_up.numel() + self.w_down.numel())
