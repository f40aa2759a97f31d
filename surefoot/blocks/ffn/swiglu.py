"""SwiGLU feed-forward network (Shazeer, 2020). Legend: B batch, L length, F hidden width."""

from __future__ import annotations

from typing import Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import FeedForwardConfig
from surefoot.blocks.ffn.gated import Gated
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


class SwiGLU(Gated):
    """See `SwiGLUConfig`."""

    def __init__(self, config: SwiGLUConfig, width: int, output_scale: float) -> None:
        super().__init__(config.hidden, width, output_scale)

    def gate(self, gate_BLF: Tensor, up_BLF: Tensor) -> Tensor:
        """See `Gated.gate`."""
        return swiglu(gate_BLF, up_BLF)
