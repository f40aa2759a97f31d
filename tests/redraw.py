"""Weights away from where they start: norm scales of 1 and gates of 0 would hide what is dropped or doubled."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from surefoot.models.initialise import generator_for, named_weights

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def redraw(module: M, seed: int = 0, *, mean: float = 1.0, std: float = 0.3) -> M:
    """The module in fp64, every weight drawn by its name: vectors around `mean`, matrices by their fan-in."""
    module.double()
    for full_name, block, name in named_weights(module):
        weight = getattr(block, name)
        noise = torch.randn(weight.shape, generator=generator_for(seed, full_name)).double()
        weight.copy_(mean + std * noise if weight.dim() == 1 else noise * weight.shape[-1] ** -0.5)
    return module
