"""Kimi delta attention (Kimi Team, 2025): the delta rule with a decay for each entry of a key.

Legend: B batch, L length, D width, H heads, K key size, V value size.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from surefoot.blocks.base import Initial
from surefoot.blocks.delta import DeltaConfig, DeltaMixer
from surefoot.blocks.start import StartOfStep


class KDAConfig(DeltaConfig):
    """Decays exp(-a softplus(x Wd + bias)) and gates sigmoid(x Wz) come through a narrow layer."""

    rank: int | None = Field(default=None, gt=0, description="width of that layer; value_size where not given")
    block: int = Field(
        default=16,
        gt=0,
        description="positions at once, a power of two; memory grows with it, for a block holds block² key_size numbers a head",
    )

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"": cls(num_heads=4, key_size=6, value_size=8, rank=5, block=8)}

    def build(self, *, width: int, output_scale: float) -> KDA:
        """The mixer itself."""
        return KDA(self, width, output_scale)


class KDA(DeltaMixer):
    """See `KDAConfig`."""

    def __init__(self, config: KDAConfig, width: int, output_scale: float) -> None:
        super().__init__(config, config.num_heads, width, output_scale)
        self.config = config
        rank = config.rank or config.value_size
        keys, values = config.num_heads * config.key_size, config.num_heads * config.value_size
        fan_in, narrow = Initial(std=width**-0.5), Initial(std=rank**-0.5)
        self.w_decay_down = self.add_weight("w_decay_down", (rank, width), ("rank", "embed"), fan_in)
        self.w_decay_up = self.add_weight("w_decay_up", (keys, rank), ("kv_heads", "rank"), narrow)
        self.dt_bias = self.add_weight("dt_bias", (keys,), ("kv_heads",), StartOfStep())
        self.w_z_down = self.add_weight("w_z_down", (rank, width), ("rank", "embed"), fan_in)
        self.w_z_up = self.add_weight("w_z_up", (values, rank), ("heads", "rank"), narrow)

    def log_decay(self, x_BLD: Tensor) -> Tensor:
        """See `DeltaMixer.log_decay`."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        moved = self.linear(self.linear(x_BLD, "w_decay_down"), "w_decay_up").to(dtype) + self.dt_bias.to(dtype)
        step_BLHK: Tensor = F.softplus(moved).unflatten(-1, (-1, self.config.key_size))
        return -self.log_a.to(dtype).exp()[:, None] * step_BLHK

    def gate(self, x_BLD: Tensor) -> Tensor:
        """See `DeltaMixer.gate`."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        z = self.linear(self.linear(x_BLD, "w_z_down"), "w_z_up").to(dtype)
        return z.sigmoid()
