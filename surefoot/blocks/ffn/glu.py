"""Gated feed-forward networks of any activation (Shazeer, 2020). Legend: B batch, L length, F hidden width."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import FeedForwardConfig
from surefoot.blocks.ffn.gated import Gated
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


class GLU(Gated):
    """See `GLUConfig`."""

    def __init__(self, config: GLUConfig, width: int, output_scale: float) -> None:
        super().__init__(config.hidden, width, output_scale)
        self.activation = ACTIVATIONS[config.activation]

    def gate(self, gate_BLF: Tensor, up_BLF: Tensor) -> Tensor:
        """See `Gated.gate`."""
        return self.activation(gate_BLF) * up_BLF
