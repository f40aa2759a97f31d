"""Feed-forward networks without a gate. Legend: B batch, L length, D width, F hidden width."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import FeedForward, FeedForwardConfig, Initial
from surefoot.ops.activations import ACTIVATIONS


class MLPConfig(FeedForwardConfig):
    """activation(x Wu) Wd; two thirds of a gated network's weights at one hidden width."""

    hidden: int = Field(gt=0, description="width between the projections")
    activation: Literal["relu2", "relu", "gelu", "gelu_tanh", "silu"] = Field(
        default="relu2", description="relu2 is the square of ReLU (So et al., 2021)"
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"relu2": cls(hidden=48), "gelu": cls(hidden=48, activation="gelu")}

    def build(self, *, width: int, output_scale: float) -> MLP:
        """The network itself."""
        return MLP(self, width, output_scale)


class MLP(FeedForward):
    """See `MLPConfig`."""

    def __init__(self, config: MLPConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.w_up = self.add_weight("w_up", (config.hidden, width), ("ffn", "embed"), Initial(std=width**-0.5))
        self.w_down = self.add_weight(
            "w_down", (width, config.hidden), ("embed", "ffn"), Initial(std=output_scale * config.hidden**-0.5)
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        return self.linear(self.activation(self.linear(x_BLD, "w_up")), "w_down")

    def flops(self) -> float:
        """Forward FLOPs a token."""
        return 2.0 * (self.w_up.numel() + self.w_down.numel())
