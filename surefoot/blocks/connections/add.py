"""The residual connection (He et al., 2016). Legend: B batch, L length, D width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from pydantic import Field
from torch import Tensor

from surefoot.blocks.base import Connection, ConnectionConfig


class AddConfig(ConnectionConfig):
    """A part reads the stream and its output, times `scale`, is added to it."""

    scale: float = Field(default=1.0, gt=0, description="multiplies what parts add")

    @classmethod
    def examples(cls) -> dict[str, Self]:
        """See `MixerConfig.examples`."""
        return {"": cls(), "scaled": cls(scale=0.5)}

    def build(self, *, width: int, index: int) -> Add:  # noqa: ARG002 - has no weights
        """The connection itself."""
        return Add(self)


class Add(Connection):
    """See `AddConfig`."""

    def __init__(self, config: AddConfig) -> None:
        super().__init__()
        self.scale = config.scale

    def forward(self, x_BLS: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """See `Connection.forward`."""
        return x_BLS, lambda y_BLD: x_BLS + y_BLD if self.scale == 1 else x_BLS.add(y_BLD, alpha=self.scale)

    def flops(self) -> float:
        """Products there are none."""
        return 0.0
