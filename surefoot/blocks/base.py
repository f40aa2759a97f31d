"""`Block`: a module that names its weights' logical axes, knows no mesh and has no dtype policy.

Legend: B batch, L length, D width.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surefoot.config import Config
from surefoot.ops.documents import Documents


@dataclass(frozen=True)
class Initial:
    """How a weight starts: every entry `mean` plus `std` times a standard normal."""

    std: float = 0.0
    mean: float = 0.0

    def draw(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """The full weight in fp32 on the CPU; the same for every device and layout."""
        full = torch.full(shape, self.mean, dtype=torch.float32)
        return full if self.std == 0 else full.add_(torch.randn(shape, generator=generator), alpha=self.std)


class Block(nn.Module):
    """A module whose own weights each carry logical axes and an initial distribution.

    `axes[name]` names the axes of weight `name`, output axis first. Layouts, optimizer groups and counts derive from it.
    `units[axis]` is how many entries along an axis belong together and are never parted (a head); 1 where not given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.axes: dict[str, tuple[str, ...]] = {}
        self.units: dict[str, int] = {}
        self.initial: dict[str, Initial] = {}

    def add_weight(self, name: str, shape: tuple[int, ...], axes: tuple[str, ...], initial: Initial) -> nn.Parameter:
        """Register one weight, unfilled; `models.initialise` fills it by its full name."""
        if len(shape) != len(axes):
            raise ValueError(f"{name} has {len(shape)} dimensions and {len(axes)} axes")
        weight = nn.Parameter(torch.empty(shape))
        self.register_parameter(name, weight)
        self.axes[name], self.initial[name] = axes, initial
        return weight


class MixerState(Protocol):
    """What a mixer keeps of the past: `length` positions seen so far."""

    length: int


class Mixer(Block):
    """Mixes along the sequence: causal, never across a document; stepping with a state equals one full pass."""

    @abstractmethod
    def forward(self, x_BLD: Tensor, docs: Documents, state: Any = None) -> Tensor:
        """(B, L, D) to (B, L, D); with a state, continues from it and advances it in place."""

    @abstractmethod
    def new_state(self, batch: int, length: int, dtype: torch.dtype) -> MixerState:
        """An empty state with room for `length` positions."""

    @abstractmethod
    def flops(self, length: int, *, causal: bool) -> float:
        """Forward FLOPs a token (multiply and add are two) in a sequence of `length`; `causal` leaves out masked scores."""

    @abstractmethod
    def state_bytes(self, length: int, dtype: torch.dtype) -> int:
        """Bytes one sequence's state holds after `length` positions."""


class MixerConfig(Config):
    """Describes a mixer."""

    def check_width(self, width: int) -> None:
        """Raise `FieldError` where the mixer cannot have this model width."""

    @abstractmethod
    def build(self, *, width: int, output_scale: float) -> Mixer:
        """A mixer of `width`; the projection back into the residual stream starts at `output_scale` / sqrt(fan-in)."""


class FeedForward(Block):
    """Acts on each position by itself."""

    @abstractmethod
    def forward(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) to (B, L, D)."""

    @abstractmethod
    def flops(self) -> float:
        """Forward FLOPs a token."""


class FeedForwardConfig(Config):
    """Describes a feed-forward network."""

    @abstractmethod
    def build(self, *, width: int, output_scale: float) -> FeedForward:
        """A network of `width`; the projection back into the residual stream starts at `output_scale` / sqrt(fan-in)."""
