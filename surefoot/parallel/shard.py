"""Data parallelism: who averages gradients and who holds which part of weights, gradients and optimizer state.

Every strategy sums gradients (the loss is divided by the step's token count beforehand), over the ranks that see other
samples or another part of the sequence. What differs is what each rank keeps:

    replicated   weights, gradients, state                      DDP (Li et al., 2020)
    ZeRO-1       weights, gradients; its part of the state      (Rajbhandari et al., 2020)
    ZeRO-2, 3    FSDP2: its part of all three; weights are gathered for a pass (2) or for a layer (3)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from surefoot.dist.collectives import gather_flat, reduce_scatter_flat, sum_all_
from surefoot.dist.layout import Layout
from surefoot.dist.mesh import Mesh
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import named_weights
from surefoot.parallel.plan import Plan

REPLICAS = ("replicate",)
SHARDS = ("shard", "context")
"""Axes over which ZeRO cuts: context-parallel ranks hold the same weights, so they share the keeping too."""


@dataclass
class Local:
    """A weight on this rank: `weight` computes, `part` is what the optimizer moves (the same tensor unless ZeRO-1)."""

    name: str
    axes: tuple[str, ...]
    layout: Layout
    weight: nn.Parameter
    part: Tensor


class DataParallel(ABC):
    """One strategy over one model."""

    def __init__(self, model: Decoder, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        self.mesh = mesh
        self.locals = [
            self._local(full_name, getattr(block, name), block.axes[name], layouts[full_name])
            for full_name, block, name in named_weights(model)
        ]

    @abstractmethod
    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        """The weight as this strategy keeps it."""

    def before_backward(self, *, is_last: bool) -> None:  # noqa: B027 - most have nothing to do here
        """Announce a micro-batch; gradients need be summed over ranks only after the last of a step."""

    @abstractmethod
    def reduce(self) -> None:
        """After the last backward: put the summed gradient of each part into its `.grad`."""

    def after_step(self) -> None:  # noqa: B027 - most have nothing to do here
        """After the optimizer moved the parts: bring the weights up to date."""

    def _sum_over_tensor_ranks(self) -> None:
        """A weight that tensor parallelism left whole saw part of the sequence or of the heads: its gradient is partial."""
        partial = [
            local.part.grad
            for local in self.locals
            if local.part.grad is not None and not local.layout.is_cut_along("tensor")
        ]
        sum_all_(partial, self.mesh.group("tensor"))


class Replicated(DataParallel):
    """Every rank keeps everything; also what one process is."""

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        return Local(name, axes, layout, weight, weight)

    def reduce(self) -> None:
        """One sum over all data ranks."""
        gradients = [local.part.grad for local in self.locals if local.part.grad is not None]
        sum_all_(gradients, self.mesh.group(*REPLICAS, *SHARDS))
        self._sum_over_tensor_ranks()


class Zero1(DataParallel):
    """Weights and gradients whole, optimizer state and update cut along the first dimension."""

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        cut = layout.split(0, *SHARDS)
        rows = self._rows(weight)
        return Local(name, axes, cut, weight, weight.detach()[rows[self.mesh.index(*SHARDS)]])

    def _rows(self, weight: Tensor) -> list[slice]:
        num_ranks = self.mesh.size(*SHARDS)
        run = -(-weight.shape[0] // num_ranks)
        return [slice(min(i * run, weight.shape[0]), min((i + 1) * run, weight.shape[0])) for i in range(num_ranks)]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over replicas, then each rank receives the sums of its parts: one reduce-scatter of all weights."""
        gradients = [local.weight.grad for local in self.locals]
        sum_all_([gradient for gradient in gradients if gradient is not None], self.mesh.group(*REPLICAS))
        group = self.mesh.group(*SHARDS)
        if group is not None:
            padded = torch.cat([self._by_rank(local.weight.grad, local.weight) for local in self.locals], 1)
            own = padded.new_empty(padded.shape[1])
            reduce_scatter_flat(own, padded.flatten(), group=group)
            pieces = own.split([self._run(local.weight) for local in self.locals])
            for local, piece in zip(self.locals, pieces, strict=True):
                local.part.grad = piece[: local.part.numel()].view_as(local.part)
        else:
            for local in self.locals:
                local.part.grad = local.weight.grad
        for local in self.locals:
            local.weight.grad = None
        self._sum_over_tensor_ranks()

    @torch.no_grad()
    def after_step(self) -> None:
        """One all-gather of all parts."""
        group = self.mesh.group(*SHARDS)
        if group is None:
            return
        own = torch.cat([_padded(local.part.reshape(-1), self._run(local.weight)) for local in self.locals])
        whole = own.new_empty((self.mesh.size(*SHARDS), own.numel()))
        gather_flat(whole.view(-1), own, group=group)
        for local, runs in zip(
            self.locals, whole.split([self._run(local.weight) for local in self.locals], 1), strict=True
        ):
            for rows, run in zip(self._rows(local.weight), runs, strict=True):
                target = local.weight.detach()[rows]
                target.copy_(run[: target.numel()].view_as(target))

    def _run(self, weight: Tensor) -> int:
        """Numbers in the largest part of a weight."""
        rows = -(-weight.shape[0] // self.mesh.size(*SHARDS))
        return rows * (weight.numel() // max(1, weight.shape[0]))

    def _by_rank(self, gradient: Tensor | None, weight: Tensor) -> Tensor:
        """The gradient as one row for each rank, the last ones padded."""
        flat = torch.zeros_like(weight).reshape(-1) if gradient is None else gradient.reshape(-1)
        num_ranks = self.mesh.size(*SHARDS)
        return _padded(flat, num_ranks * self._run(weight)).view(num_ranks, -1)


class FullySharded(DataParallel):
    """FSDP2 (Zhao et al., 2023) over the data ranks, one unit a layer and one for what surrounds them."""

    def __init__(self, model: Decoder, mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        super().__init__(model, mesh, layouts)
        self._root = model

    @staticmethod
    def wrap(model: Decoder, mesh: Mesh, *, device_type: str, zero: int, reshard: int | None) -> None:
        """Make FSDP2 units of a model that may still be on meta."""
        parts = (REPLICAS, SHARDS) if mesh.size(*REPLICAS) > 1 else (SHARDS,)
        device_mesh = mesh.device_mesh(device_type, *parts)
        reshard_after_forward: bool | int = (reshard or True) if zero == 3 else False
        for unit in (*model.layers, model):
            fully_shard(unit, mesh=device_mesh, reshard_after_forward=False if unit is model else reshard_after_forward)
            assert isinstance(unit, FSDPModule)
            # The loss is divided by the step's tokens before backward: ranks add up. gloo has no scaled sum.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        register_fsdp_forward_method(model, "loss")

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        assert isinstance(weight, DTensor)
        return Local(name, axes, layout.split(0, *SHARDS), weight, weight.to_local().detach())

    def before_backward(self, *, is_last: bool) -> None:
        """Gradients stay whole until the last micro-batch, then are reduced as backward goes."""
        assert isinstance(self._root, FSDPModule)
        self._root.set_requires_gradient_sync(is_last)

    def reduce(self) -> None:
        """Backward has summed over the data ranks; what is left is to hand the parts their gradients."""
        for local in self.locals:
            gradient = local.weight.grad
            local.part.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            local.weight.grad = None
        self._sum_over_tensor_ranks()


def wrap(plan: Plan, model: Decoder, mesh: Mesh, device: torch.device) -> None:
    """What a strategy does to a model before its weights have memory."""
    if plan.is_fully_sharded:
        FullySharded.wrap(model, mesh, device_type=device.type, zero=plan.zero, reshard=plan.reshard)


def data_parallel(plan: Plan, model: Decoder, mesh: Mesh, layouts: Mapping[str, Layout]) -> DataParallel:
    """The plan's strategy over a model whose weights have memory."""
    if plan.is_fully_sharded:
        return FullySharded(model, mesh, layouts)
    return (Replicated if plan.shard == 1 else Zero1)(model, mesh, layouts)


def _padded(flat: Tensor, length: int) -> Tensor:
    return flat if flat.numel() == length else torch.cat((flat, flat.new_zeros(length - flat.numel())))
