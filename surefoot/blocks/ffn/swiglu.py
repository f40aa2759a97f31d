"""SwiGLU feed-forward network (Shazeer, 2020). Legend: B batch, L length, D width, F hidden width."""

from __future__ import annotations

from typing import Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import FeedForward, FeedForwardConfig, Initial
from surefoot.ops.swiglu import swiglu


class SwiGLUConfig(FeedForwardConfig):
    """silu(x Wg) · (x Wu) Wd."""

    hidden: int = Field(gt=0, description="width between the projections")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"": cls(hidden=48)}

    def build(self, *, width: int, output_scale: float) -> SwiGLU:
        """The network itself."""
        return SwiGLU(self, width, output_scale)


class SwiGLU(FeedForward):
    """Gated feed-forward network; see `SwiGLUConfig`."""

    def __init__(self, config: SwiGLUConfig, width: int, output_scale: float) -> None:
        super().__init__()
        fan_in = Initial(std=width**-0.5)
        self.w_gate = self.add_weight("w_gate", (config.hidden, width), ("ffn", "embed"), fan_in)
        self.w_up = self.add_weight("w_up", (config.hidden, width), ("ffn", "embed"), fan_in)
        self.w_down = self.add_weight(
            "w_down", (width, config.hidden), ("embed", "ffn"), Initial(std=output_scale * config.hidden**-0.5)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        return self.linear(swiglu(self.linear(x_BLD, "w_gate"), self.linear(x_BLD, "w_up")), "w_down")

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * (self.w_gate.numel() + self.w_up.numel() + self.w_down.numel())
