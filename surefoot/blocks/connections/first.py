"""Each part sees the embedding again, by learned scalars. Legend: B batch, L length, D width, S = 2·D: x, then x0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Connection, ConnectionConfig, Initial


class FirstConfig(ConnectionConfig):
    """x becomes a x + b x0 + part(a x + b x0), where x0 is the embedding and a and b are learned (Jordan et al., 2024).

    x0 goes along as a second vector a token, so that each layer has it wherever it lies.
    """

    first: float = Field(default=0.0, description="where b starts; a starts at 1")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"": cls(first=0.5)}

    @property
    def num_streams(self) -> int:
        """x and x0."""
        return 2

    def build(self, *, width: int, index: int) -> First:  # noqa: ARG002 - all parts are alike
        """The connection itself."""
        return First(self)

    def collapse(self, x_BLS: Tensor) -> Tensor:
        """x."""
        return x_BLS.chunk(2, -1)[0]


class First(Connection):
    """See `FirstConfig`."""

    def __init__(self, config: FirstConfig) -> None:
        super().__init__()
        self.keep = self.add_weight("keep", (1,), ("streams",), Initial(mean=1.0))
        self.first = self.add_weight("first", (1,), ("streams",), Initial(mean=config.first))

    def forward(self, x_BLS: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See `Connection.forward`."""
        x_BLD, first_BLD = x_BLS.chunk(2, -1)
        mixed_BLD = self.keep.to(x_BLS.dtype) * x_BLD + self.first.to(x_BLS.dtype) * first_BLD
        return mixed_BLD, lambda y_BLD: torch.cat((mixed_BLD + y_BLD, first_BLD), -1)

    def flops(self) -> float:
        """Matrix products there are none."""
        return 0.0
