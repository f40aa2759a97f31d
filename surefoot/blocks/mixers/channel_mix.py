"""The channel mixing of RWKV-7 (Peng et al., 2025): a squared-ReLU network of a token mixed with the one before it.

It takes a feed-forward network's place but sees another position, so it is a mixer with a state: a model has it in layers without
a network of their own (`mixer_pattern="rc"`, `ffn_pattern="-"`).

Legend: B batch, L length, D width, F hidden width.
"""

from __future__ import annotations

from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Initial, Mixer, MixerConfig, Shared
from surefoot.ops.activations import ACTIVATIONS
from surefoot.ops.conv import causal_conv
from surefoot.ops.documents import Documents
from surefoot.ops.runs import OneRun, Runs


class ChannelMixConfig(MixerConfig):
    """relu²((x + mix · (x_before - x)) Wk) Wv, x_before 0 where a document starts."""

    hidden: int = Field(gt=0, description="width between the projections")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"": cls(hidden=48)}

    def build(self, *, width: int, output_scale: float) -> ChannelMix:
        """The mixer itself."""
        return ChannelMix(self, width, output_scale)


class ChannelMixState:
    """The position before."""

    def __init__(self, tail_B1D: Tensor) -> None:
        self.tail_B1D, self.length = tail_B1D, 0

    def advance(self, tail_B1D: Tensor, num_positions: int) -> None:
        """After `num_positions` more."""
        self.tail_B1D.copy_(tail_B1D)
        self.length += num_positions


class ChannelMix(Mixer):
    """See `ChannelMixConfig`. `runs` may be swapped where the sequence is cut."""

    def __init__(self, config: ChannelMixConfig, width: int, output_scale: float) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.runs: Runs = OneRun()
        self.activation = ACTIVATIONS["relu2"]
        self.mix = self.add_weight("mix", (width,), ("embed",), Initial(mean=0.5))
        self.w_k = self.add_weight("w_k", (config.hidden, width), ("ffn", "embed"), Initial(std=width**-0.5))
        out = Initial(std=output_scale * config.hidden**-0.5)
        self.w_v = self.add_weight("w_v", (width, config.hidden), ("embed", "ffn"), out)

    def forward(
        self,
        x_BLD: Tensor,
        docs: Documents,
        state: ChannelMixState | None = None,
        shared: Shared | None = None,  # noqa: ARG002 - reads and leaves nothing
    ) -> Tensor:
        """(B, L, D) to (B, L, D)."""
        # A filter that holds the position before: it begins anew with documents, and runs, as convolutions do.
        taps_D2 = x_BLD.new_tensor([1.0, 0.0]).expand(x_BLD.shape[-1], 2)
        tail = None if state is None else state.tail_B1D
        before_BLD, tail_B1D = causal_conv(x_BLD, taps_D2, None, docs, self.runs, tail)
        mixed_BLD = torch.addcmul(x_BLD, before_BLD - x_BLD, self.mix.to(x_BLD.dtype))
        if state is not None:
            state.advance(tail_B1D, x_BLD.shape[1])
        return self.linear(self.activation(self.linear(mixed_BLD, "w_k")), "w_v")

    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> ChannelMixState:  # noqa: ARG002 - of one size
        """Zeros."""
        return ChannelMixState(torch.zeros((batch, 1, self.width), dtype=dtype, device=self.w_v.device))

    def flops(self, length: int, *, causal: bool) -> float:  # noqa: ARG002 - no scores
        """Forward FLOPs a token: the projections."""
        return 2.0 * (self.w_k.numel() + self.w_v.numel())

    def state_bytes(self, length: int, dtype: torch.dtype) -> int:  # noqa: ARG002 - of one size
        """D numbers."""
        return self.width * dtype.itemsize

    def decode_bytes(self, length: int, dtype: torch.dtype) -> int:
        """All of the state is read and written."""
        return 2 * self.state_bytes(length, dtype)
