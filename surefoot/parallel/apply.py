"""The order of passes, in one place: cut weights -> collectives around blocks -> shard -> materialise -> initialise.

The model comes on meta and leaves with this rank's part of every weight in memory. Each full weight is drawn from its own
generator and cut afterwards, so that no layout changes how a model starts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import generator_for, materialise, named_weights
from surefoot.parallel import shard, tensor
from surefoot.parallel.plan import Plan
from surefoot.parallel.shard import DataParallel


@dataclass
class Laid:
    """A model laid out over a mesh."""

    model: Decoder
    mesh: Mesh
    data_parallel: DataParallel


def check(plan: Plan, config: DecoderConfig, sequence_length: int) -> None:
    """`ConfigError` where the plan cannot carry the model; needs no process group."""
    with torch.device("meta"):
        model = config.build()
    tensor.check(model, plan.tensor, sequence_length)


def lay_out(
    plan: Plan, config: DecoderConfig, mesh: Mesh, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Laid:
    """Build, cut, shard and initialise a model; every rank of the mesh calls it at the same time."""
    with torch.device("meta"):
        model = config.build().to(dtype)
    layouts = tensor.layouts_of(model, plan.tensor)
    initial = {name: (block.initial[weight], layouts[name].shape) for name, block, weight in named_weights(model)}
    tensor.apply(model, mesh, layouts)
    shard.wrap(plan, model, mesh, device)
    materialise(model, device)
    data_parallel = shard.data_parallel(plan, model, mesh, layouts)
    with torch.no_grad():
        for local in data_parallel.locals:
            distribution, shape = initial[local.name]
            full = distribution.draw(shape, generator_for(seed, local.name))
            local.part.copy_(full[local.layout.box(mesh.grid, mesh.coordinates).slices])
    data_parallel.after_step()
    return Laid(model, mesh, data_parallel)
