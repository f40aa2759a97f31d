"""Hyper-connections: several residual streams that parts read from and write to by learned weights (Zhu et al., 2024).

Legend: B batch, L length, D width, N streams, S = N·D.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Connection, ConnectionConfig, Initial
from surefoot.blocks.norm import RMSNorm


class HyperConfig(ConnectionConfig):
    """A part reads a weighted sum of N streams; each stream becomes a weighted sum of all, plus a weight times the output.

    Weights are learned, and with `dynamic` each token adds tanh of a projection of its own streams to them. They start such
    that the model is the one with a single stream.
    """

    streams: int = Field(default=4, ge=2, description="4 in the paper")
    dynamic: bool = Field(default=True, description="whether weights also depend on the token")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"static": cls(streams=2, dynamic=False), "dynamic": cls(streams=3)}

    @property
    def num_streams(self) -> int:
        """As configured."""
        return self.streams

    def build(self, *, width: int, index: int) -> Hyper:
        """The connection itself."""
        return Hyper(self, width, index)

    def collapse(self, x_BLS: Tensor) -> Tensor:
        """The sum of the streams."""
        return torch.stack(x_BLS.chunk(self.streams, -1)).sum(0)


class Hyper(Connection):
    """See `HyperConfig`. `read`, `mix` and `write` are A_m, A_r and B of the paper's section 2, less where they start."""

    def __init__(self, config: HyperConfig, width: int, index: int) -> None:
        super().__init__()
        self.config, self.width, self.index, num = config, width, index % config.streams, config.streams
        self.read = self.add_weight("read", (num,), ("streams",), Initial())
        self.write = self.add_weight("write", (num,), ("streams",), Initial(mean=1.0))
        self.mix = self.add_weight("mix", (num, num), ("streams", "streams"), Initial())
        if config.dynamic:
            self.norm = RMSNorm(width, 1e-6)
            self.w_read = self.add_weight("w_read", (1, width), ("streams", "embed"), Initial())
            self.w_write = self.add_weight("w_write", (1, width), ("streams", "embed"), Initial())
            self.w_mix = self.add_weight("w_mix", (num, width), ("streams", "embed"), Initial())
            # Small, so that a token's own weights grow into the static ones.
            self.scale_read = self.add_weight("scale_read", (1,), ("streams",), Initial(mean=0.01))
            self.scale_write = self.add_weight("scale_write", (1,), ("streams",), Initial(mean=0.01))
            self.scale_mix = self.add_weight("scale_mix", (1,), ("streams",), Initial(mean=0.01))

    def forward(self, x_BLS: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See `Connection.forward`."""
        num = self.config.streams
        x_BLND = torch.stack(x_BLS.chunk(num, -1), -2)
        dtype = torch.promote_types(x_BLS.dtype, torch.float32)
        # Learned weights are what is added to the start: reading stream `index`, keeping each stream.
        is_read_N = torch.arange(num, device=x_BLS.device) == self.index
        read, write = self.read.to(dtype) + is_read_N, self.write.to(dtype)
        mix = self.mix.to(dtype) + torch.eye(num, device=x_BLS.device, dtype=dtype)
        if self.config.dynamic:
            normed_BLND = self.norm(x_BLND)
            weights = ("w_read", "w_write", "w_mix")
            of_read, of_write, of_mix = self.linear(normed_BLND, *weights).to(dtype).tanh().split((1, 1, num), -1)
            read = read + self.scale_read * of_read[..., 0]
            write = write + self.scale_write * of_write[..., 0]
            mix = mix + self.scale_mix * of_mix
        read, write, mix = (weight.to(x_BLS.dtype) for weight in (read, write, mix))
        input_BLD = (read[..., None] * x_BLND).sum(-2)

        def after(y_BLD: Tensor) -> Tensor:
            # Row i of `mix` says what each stream gets of stream i.
            mixed_BLND = mix.transpose(-1, -2) @ x_BLND
            streams_BLND = mixed_BLND + write[..., None] * y_BLD[..., None, :]
            return torch.cat(streams_BLND.unbind(-2), -1)  # no view: FSDP hooks on what a layer returns

        return input_BLD, after

    def flops(self) -> float:
        """Forward FLOPs a token: mixing the streams, and the projections of each."""
        num = self.config.streams
        projections = num * (num + 2) if self.config.dynamic else 0
        return 2.0 * self.width * (num * num + projections)
