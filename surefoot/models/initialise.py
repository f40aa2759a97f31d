"""Filling a model's weights: each by a generator of its own, seeded by the weight's full name.

No weight's start depends on the order of construction, on the other weights, or on how the model is laid out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from surefoot.blocks.base import Block


def named_weights(model: nn.Module) -> Iterator[tuple[str, Block, str]]:
    """Each logical weight once: its full name, the block that owns it and its name there.

    Raises `TypeError` when a parameter has no axes: such a weight could be neither laid out nor grouped.
    """
    owned: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, Block):
            for name in module.axes:
                owned.add(id(getattr(module, name)))
                yield (f"{prefix}.{name}" if prefix else name), module, name
    for name, parameter in model.named_parameters():
        if id(parameter) not in owned:
            raise TypeError(f"parameter {name} names no axes; register it with Block.add_weight")


def named_states(model: nn.Module) -> Iterator[tuple[str, Block, str]]:
    """What blocks learn otherwise than by gradient: full name, the block that owns it and its name there."""
    for prefix, module in model.named_modules():
        if isinstance(module, Block):
            for name in module.states:
                yield (f"{prefix}.{name}" if prefix else name), module, name


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give a model on meta memory, weights unfilled and buffers at 0.

    Weights that were one stay one, which `nn.Module.to_empty` forgets.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            places.setdefault(id(weight), []).append((module, name))
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    for (first, first_name), *others in places.values():
        for module, name in others:
            module.register_parameter(name, getattr(first, first_name))


def generator_for(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def constant_starts(model: nn.Module) -> dict[str, float]:
    """Where weights start whose entries all start alike, by full name: norm scales, gates, biases.

    A check redraws them, since at their start a dropped one may not be seen.
    """
    starts = {full_name: block.initial[name] for full_name, block, name in named_weights(model)}
    return {full_name: initial.mean for full_name, initial in starts.items() if initial.std == 0}


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every weight in place."""
    for full_name, block, name in named_weights(model):
        weight: Tensor = getattr(block, name)
        weight.copy_(block.initial[name].draw(weight.shape, generator_for(seed, full_name)))
