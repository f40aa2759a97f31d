"""Gated feed-forward networks of any activation (Shazeer, 2020). Legend: B batch, L length, D width, F hidden width."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import FeedForward, FeedForwardConfig, Initial
from surefoot.ops.activations import ACTIVATIONS


class GLUConfig(FeedForwardConfig):
    """activation(x Wg) · (x Wu) Wd: GeGLU, ReGLU and the bilinear network; `SwiGLUConfig` is the fast form of SwiGLU."""

    hidden: int = Field(gt=0, description="width between the projections")
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity"] = Field(
        default="gelu_tanh", description="gelu_tanh is the approximation that Gemma uses"
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"gelu": cls(hidden=48), "relu2": cls(hidden=48, activation="relu2")}

    def build(self, *, width: int, output_scale: float) -> GLU:
        """The network itself."""
        return GLU(self, width, output_scale)


class GLU(FeedForward):
    """See `GLUConfig`."""

    def __init__(self, config: GLUConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        fan_in = Initial(std=width**-0.5)
        self.w_gate = self.add_weight("w_gate", (config.hidden, width), ("ffn", "embed"), fan_in)
        self.w_up = self.add_weight("w_up", (config.hidden, width), ("ffn", "embed"), fan_in)
        self.w_down = self.add_weight(
            "w_down", (width, config.hidden), ("embed", "ffn"), Initial(std=output_scale * config.hidden**-0.5)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        h_BLF = self.activation(self.linear(x_BLD, "w_gate")) * self.linear(x_BLD, "w_up")
        return self.linear(h_BLF, "w_down")

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * (self.w_gate.numel() + self.w_up.numel() + self.w_down.numel())
