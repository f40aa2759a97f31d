"""Gated short convolution (Liquid AI, 2025, LFM2): b · x through a short causal filter, times c.

Legend: B batch, L length, D width, C channels, T taps.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.ops.conv import causal_conv
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun, Runs


class ShortConvConfig(MixerConfig):
    """(c · conv(b · x)) Wo, where b, c and x are projections of the input: it sees `conv_size` positions and no more."""

    channels: int | None = Field(
        default=None, gt=0, description="width between the projections; the model's if not given"
    )
    conv_size: int = Field(default=3, ge=2, description="positions that the convolution sees, its own included")
    conv_bias: bool = False

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"": cls(), "bias": cls(channels=24, conv_size=4, conv_bias=True)}

    def build(self, *, width: int, output_scale: float) -> ShortConv:
        """The mixer itself."""
        return ShortConv(self, width, output_scale)


class ShortConvState:
    """The convolution's past."""

    def __init__(self, tail_BTC: Tensor) -> None:
        self.tail_BTC, self.length = tail_BTC, 0

    def advance(self, tail_BTC: Tensor, num_positions: int) -> None:
        """After `num_positions` more."""
        self.tail_BTC.copy_(tail_BTC)
        self.length += num_positions


class ShortConv(Mixer):
    """See `ShortConvConfig`. `runs` may be swapped where the sequence is cut."""

    def __init__(self, config: ShortConvConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config = config
        self.channels = config.channels or width
        self.runs: Runs = OneRun()
        self.least_run = config.conv_size - 1
        fan_in = Initial(std=width**-0.5)
        self.w_b = self.add_weight("w_b", (self.channels, width), ("ffn", "embed"), fan_in)
        self.w_c = self.add_weight("w_c", (self.channels, width), ("ffn", "embed"), fan_in)
        self.w_x = self.add_weight("w_x", (self.channels, width), ("ffn", "embed"), fan_in)
        taps = Initial(std=config.conv_size**-0.5)
        self.conv = self.add_weight("conv", (self.channels, config.conv_size), ("ffn", "taps"), taps)
        self.conv_bias = (
            self.add_weight("conv_bias", (self.channels,), ("ffn",), Initial()) if config.conv_bias else None
        )
        out = Initial(std=output_scale * self.channels**-0.5)
        self.w_out = self.add_weight("w_out", (width, self.channels), ("embed", "ffn"), out)

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: ShortConvState | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - reads and leaves nothing
    ) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        b, c, x = self.linear(x_BLD, "w_b", "w_c", "w_x").chunk(3, -1)
        tail = None if state is None else state.tail_BTC
        y_BLC, tail_BTC = causal_conv(b * x, self.conv, self.conv_bias, docs, self.runs, tail)
        if state is not None:
            state.advance(tail_BTC, x_BLD.shape[1])
        return self.linear(c * y_BLC, "w_out")

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> ShortConvState:  # noqa: ARG002 - of one size
        """Zeros."""
        shape = (batch, self.config.conv_size - 1, self.channels)
        return ShortConvState(torch.zeros(shape, dtype=dtype, device=self.w_out.device))

    def flops(self, length: int, *, causal: bool) -> float:  # noqa: ARG002 - no scores
        """Forward FLOPs a token: the projections."""
        return 2.0 * (self.w_b.numel() + self.w_c.numel() + self.w_x.numel() + self.w_out.numel())

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:  # noqa: ARG002 - of one size
        """(T - 1) C numbers."""
        return (self.config.conv_size - 1) * self.channels * dtype.itemsize

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """All of the state is read and written."""
        return 2 * self.state_bytes(length, dtype)
