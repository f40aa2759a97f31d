"""From a vision encoder's width to a language model's (Liu et al., 2023). Legend: N images, P patches, W width of features."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Block, Initial
from surefoot.blocks.images import ImagePart, ImagePartConfig
from surefoot.ops.activations import ACTIVATIONS


class ProjectorConfig(ImagePartConfig):
    """activation(x W1) W2, both as wide as the language model."""

    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu"] = Field(default="gelu")
    bias: Literal["none", "both"] = Field(default="both", description="of which projections")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `ImagePartConfig.examples`."""
        return {"biases": cls(), "no biases": cls(activation="silu", bias="none")}

    def build(self, *, features: int, width: int) -> Projector:
        """Of features of that width, for a language model of `width`."""
        return Projector(self, features, width)


class Projector(ImagePart, Block):
    """See `ProjectorConfig`."""

    def __init__(self, config: ProjectorConfig, features: int, width: int) -> None:
        super().__init__()
        self.activation, self.has_bias = ACTIVATIONS[config.activation], config.bias == "both"
        self.add_weight("w_in", (width, features), ("ffn", "features"), Initial(std=features**-0.5))
        self.add_weight("w_out", (width, width), ("embed", "ffn"), Initial(std=width**-0.5))
        if self.has_bias:
            self.add_weight("b_in", (width,), ("ffn",), Initial())
            self.add_weight("b_out", (width,), ("embed",), Initial())

    def forward(self, x_NPW: Tensor) -> Tensor:
        """(N, P, W) to (N, P, D)."""
        return self._map(self.activation(self._map(x_NPW, "in")), "out")

    def flops(self) -> float:
        """Forward FLOPs a patch."""
        return 2.0 * sum(weight.numel() for weight in self.parameters() if weight.dim() == 2)

    def _map(self, x: Tensor, name: str) -> Tensor:
        y = self.linear(x, f"w_{name}")
        return y + self.get_parameter(f"b_{name}").to(y.dtype) if self.has_bias else y
