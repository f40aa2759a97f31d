"""How the decays of recurrent mixers start (Gu and Dao, 2023): a forgets at many rates, dt moves by little."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.blocks.base import Initial


@dataclass(frozen=True)
class StartOfDecay(Initial):
    """log a with a uniform between 1 and 16."""

    std: float = 1.0

    def draw(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See `Initial.draw`."""
        return torch.empty(shape).uniform_(1, 16, generator=generator).log_()


@dataclass(frozen=True)
class StartOfStep(Initial):
    """What softplus turns into a dt that is log-uniform between two bounds."""

    std: float = 1.0
    low: float = 1e-3
    high: float = 1e-1

    def draw(self, shape: torch.Size | tuple[int, ...], generator: torch.Generator) -> Tensor:
        """See `Initial.draw`."""
        dt = torch.empty(shape).uniform_(math.log(self.low), math.log(self.high), generator=generator)
        dt = dt.exp_().clamp_min_(1e-4)
        return dt + torch.log(-torch.expm1(-dt))
