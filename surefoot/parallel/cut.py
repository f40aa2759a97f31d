"""Giving a model on meta its parts of the weights, before anything is wrapped around it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from surefoot.dist.layout import Layout
from surefoot.dist.mesh import Mesh
from surefoot.models.initialise import named_weights


def cut_weights(model: nn.Module, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
    """Replace each weight by this rank's part of it; weights that are one stay one."""
    parts: dict[int, nn.Parameter] = {}
    for full_name, block, name in named_weights(model):
        weight, layout = getattr(block, name), layouts[full_name]
        if layout.splits:
            box = layout.box(mesh.grid, mesh.coordinates)
            parts[id(weight)] = nn.Parameter(weight.new_empty(box.shape))
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if id(weight) in parts:
                module.register_parameter(name, parts[id(weight)])
