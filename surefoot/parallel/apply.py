"""The order of passes, in one place: swap attention -> cut weights -> collectives around blocks -> shard -> materialise ->
initialise.

The model comes on meta and leaves with this rank's part of every weight in memory. Each full weight is drawn from its own
generator and cut afterwards, so that no layout changes how a model starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import Decoder, DecoderConfig
from surefoot.models.initialise import generator_for, materialise, named_weights
from surefoot.parallel import context, shard, tensor
from surefoot.parallel.plan import Plan
from surefoot.parallel.shard import DataParallel

MicroBatch = tuple[Tensor, Tensor, Tensor]
"""Tokens, targets and document numbers, each (B, L): this rank's samples, whole sequences."""


@dataclass
class Laid:
    """A model laid out over a mesh."""

    model: Decoder
    mesh: Mesh
    data_parallel: DataParallel

    def accumulate(
        self, micro_batches: Sequence[MicroBatch], num_tokens: int, dtype: torch.dtype
    ) -> tuple[float, float]:
        """Gradients of (sum over valid tokens) / `num_tokens` into every part's `.grad`, summed over all ranks.

        Returns the sums of nll and z over this rank's own tokens.
        """
        nll, z = 0.0, 0.0
        for number, micro_batch in enumerate(micro_batches):
            self.data_parallel.before_backward(is_last=number == len(micro_batches) - 1)
            tokens_BL, targets_BL, docs = context.cut(self.mesh, *micro_batch)
            objective, sums = self.model.loss(tokens_BL, targets_BL, docs, dtype=dtype)
            torch.autograd.backward(objective / num_tokens)
            nll += sums.nll.item()
            z += sums.z.item()
        self.data_parallel.reduce()
        return nll, z

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], dtype: torch.dtype) -> float:
        """The sum of nll over this rank's own tokens."""
        nll = 0.0
        for micro_batch in micro_batches:
            tokens_BL, targets_BL, docs = context.cut(self.mesh, *micro_batch)
            nll += self.model.loss(tokens_BL, targets_BL, docs, dtype=dtype)[1].nll.item()
        return nll


def check(plan: Plan, config: DecoderConfig, sequence_length: int) -> None:
    """`ConfigError` where the plan cannot carry the model; needs no process group."""
    with torch.device("meta"):
        model = config.build()
    tensor.check(model, plan.tensor, sequence_length)
    context.check(model, plan.context, plan.context_kind, plan.tensor, sequence_length)


def lay_out(
    plan: Plan, config: DecoderConfig, mesh: Mesh, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Laid:
    """Build, cut, shard and initialise a model; every rank of the mesh calls it at the same time."""
    with torch.device("meta"):
        model = config.build().to(dtype)
    layouts = tensor.layouts_of(model, plan.tensor)
    initial = {name: (block.initial[weight], layouts[name].shape) for name, block, weight in named_weights(model)}
    context.apply(model, mesh, plan.context_kind)
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
