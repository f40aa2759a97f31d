"""Gated DeltaNet (Yang et al., 2024): the delta rule with a decay that is one number a head and position.

Legend: B batch, L length, D width, H value heads, V value size.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Initial
from surefoot.blocks.delta import DeltaConfig, DeltaMixer
from surefoot.blocks.start import StartOfStep
from surefoot.config import FieldError


class GatedDeltaNetConfig(DeltaConfig):
    """The decay is exp(-a softplus(x Wd + bias)); outputs are gated by silu(x Wz)."""

    num_key_heads: int | None = Field(default=None, gt=0, description="num_heads where not given; must divide it")
    eigenvalues: Literal["positive", "signed"] = Field(
        default="positive",
        description="signed: beta goes up to 2, so that a position may turn what it finds round (Grazzi et al., 2024)",
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {
            "": cls(num_heads=4, key_size=6, value_size=8, block=8),
            "groups": cls(num_heads=4, num_key_heads=2, key_size=6, value_size=8, block=8),
            "signed": cls(num_heads=4, key_size=6, value_size=8, eigenvalues="signed", block=8),
        }

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_key_heads is not None and self.num_heads % self.num_key_heads:
            raise FieldError("num_key_heads", self.num_key_heads, f"must divide num_heads {self.num_heads}")
        return self

    def build(self, *, width: int, output_scale: float) -> GatedDeltaNet:
        """The mixer itself."""
        return GatedDeltaNet(self, width, output_scale)


class GatedDeltaNet(DeltaMixer):
    """See `GatedDeltaNetConfig`."""

    def __init__(self, config: GatedDeltaNetConfig, width: int, output_scale: float) -> None:
        super().__init__(config, config.num_key_heads or config.num_heads, width, output_scale)
        self.config = config
        self.max_strength = 2.0 if config.eigenvalues == "signed" else 1.0
        heads, fan_in = config.num_heads, Initial(std=width**-0.5)
        self.w_z = self.add_weight("w_z", (heads * config.value_size, width), ("heads", "embed"), fan_in)
        self.w_decay = self.add_weight("w_decay", (heads, width), ("per_head", "embed"), fan_in)
        self.dt_bias = self.add_weight("dt_bias", (heads,), ("per_head",), StartOfStep())

    def log_decay(self, x_BLD: Tensor) -> Tensor:
        """See `DeltaMixer.log_decay`."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        step_BLH = F.softplus(self.linear(x_BLD, "w_decay").to(dtype) + self.dt_bias.to(dtype))
        return (-self.log_a.to(dtype).exp() * step_BLH)[..., None]

    def gate(self, x_BLD: Tensor) -> Tensor:
        """See `DeltaMixer.gate`."""
        return F.silu(self.linear(x_BLD, "w_z").to(torch.promote_types(x_BLD.dtype, torch.float32)))
