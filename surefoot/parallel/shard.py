"""Data parallelism: who averages gradients and who holds which part of weights, gradients and optimizer state.

Every strategy sums gradients (the loss is divided by the step's token count beforehand), over the ranks that see other
samples or another part of the sequence. What differs is what each rank keeps:

    replicated   weights, gradients, state                      DDP (Li et al., 2020)
    ZeRO-1       weights, gradients; its part of the state      (Rajbhandari et al., 2020)
    ZeRO-2, 3    FSDP2: its part of all three; weights are gathered for a pass (2) or for a layer (3)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from surefoot.dist.collectives import gather_flat, reduce_scatter_flat, sum_all_
from surefoot.dist.layout import Layout
from surefoot.dist.mesh import Grid, Mesh
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import named_weights
from surefoot.parallel.pipeline import Stage
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
    """One strategy over this rank's part of a model: the whole, or the stages it holds.

    `copies` are weights that another stage owns: treated like the others, but no optimizer moves them.
    """

    def __init__(self, modules: Sequence[nn.Module], mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        self.mesh, self.modules = mesh, modules
        self.locals: list[Local] = []
        self.copies: list[Local] = []
        for module in modules:
            owners = module.copies if isinstance(module, Stage) else {}
            for name, block, weight in named_weights(module):
                owner = owners.get(name, name)
                local = self._local(owner, getattr(block, weight), block.axes[weight], layouts[owner])
                (self.copies if name in owners else self.locals).append(local)

    @property
    def everything(self) -> list[Local]:
        """What is owned and what is copied, in an order that all ranks with these stages share."""
        return [*self.locals, *self.copies]

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
            for local in self.everything
            if local.part.grad is not None and not local.layout.is_cut_along("tensor")
        ]
        sum_all_(partial, self.mesh.group("tensor"))


class Replicated(DataParallel):
    """Every rank keeps everything; also what one process is."""

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        return Local(name, axes, layout, weight, weight)

    def reduce(self) -> None:
        """One sum over all data ranks."""
        gradients = [local.part.grad for local in self.everything if local.part.grad is not None]
        sum_all_(gradients, self.mesh.group(*REPLICAS, *SHARDS))
        self._sum_over_tensor_ranks()


class Zero1(DataParallel):
    """Weights and gradients whole, optimizer state and update cut along the first dimension."""

    def __init__(self, modules: Sequence[nn.Module], mesh: Mesh, layouts: Mapping[str, Layout]) -> None:
        super().__init__(modules, mesh, layouts)
        # Of each weight every rank's rows, and the numbers in the largest part: what travels is padded to that.
        self._rows = [self._rows_of(local.weight) for local in self.everything]
        self._runs = [
            rows[0].stop * math.prod(local.weight.shape[1:])
            for rows, local in zip(self._rows, self.everything, strict=True)
        ]

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        part = weight.detach()[self._rows_of(weight)[self.mesh.index(*SHARDS)]]
        return Local(name, axes, layout.split(0, *SHARDS), weight, part)

    def _rows_of(self, weight: Tensor) -> list[slice]:
        """Each rank's rows of a weight that tensor parallelism has cut already."""
        num_ranks = self.mesh.size(*SHARDS)
        cut = Layout(tuple(weight.shape)).split(0, "shard")
        grid = Grid({"shard": num_ranks})
        return [cut.box(grid, grid.coordinates(rank)).slices[0] for rank in range(num_ranks)]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum over replicas, then each rank receives the sums of its parts: one reduce-scatter of all weights."""
        gradients = [local.weight.grad for local in self.everything]
        sum_all_([gradient for gradient in gradients if gradient is not None], self.mesh.group(*REPLICAS))
        by_rank = torch.cat(
            [self._by_rank(local.weight, run) for local, run in zip(self.everything, self._runs, strict=True)], 1
        )
        own = by_rank.new_empty(by_rank.shape[1])
        reduce_scatter_flat(own, by_rank.flatten(), group=self.mesh.group(*SHARDS))
        for local, piece in zip(self.everything, own.split(self._runs), strict=True):
            local.part.grad = piece[: local.part.numel()].view_as(local.part)
            local.weight.grad = None
        self._sum_over_tensor_ranks()

    @torch.no_grad()
    def after_step(self) -> None:
        """One all-gather of all parts."""
        own = torch.cat(
            [_padded(local.part.reshape(-1), run) for local, run in zip(self.everything, self._runs, strict=True)]
        )
        whole = own.new_empty((self.mesh.size(*SHARDS), own.numel()))
        gather_flat(whole.view(-1), own, group=self.mesh.group(*SHARDS))
        for local, rows, by_rank in zip(self.everything, self._rows, whole.split(self._runs, 1), strict=True):
            for cut, run in zip(rows, by_rank, strict=True):
                target = local.weight.detach()[cut]
                target.copy_(run[: target.numel()].view_as(target))

    def _by_rank(self, weight: Tensor, run: int) -> Tensor:
        """The gradient as one row for each rank, the last ones padded."""
        flat = (torch.zeros_like(weight) if weight.grad is None else weight.grad).reshape(-1)
        num_ranks = self.mesh.size(*SHARDS)
        return _padded(flat, num_ranks * run).view(num_ranks, run)


class FullySharded(DataParallel):
    """FSDP2 (Zhao et al., 2023) over the data ranks, one unit a layer and one for what surrounds them."""

    @staticmethod
    def wrap(module: Decoder | Stage, mesh: Mesh, *, device_type: str, reshard_after_forward: bool | int) -> None:
        """Make FSDP2 units of a model or stage that may still be on meta."""
        parts = (REPLICAS, SHARDS) if mesh.size(*REPLICAS) > 1 else (SHARDS,)
        device_mesh = mesh.device_mesh(device_type, *parts)
        for unit in (*module.layers.children(), module):
            fully_shard(unit, mesh=device_mesh, reshard_after_forward=unit is not module and reshard_after_forward)
            assert isinstance(unit, FSDPModule)
            # The loss is divided by the step's tokens before backward: ranks add up. gloo has no scaled sum.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if isinstance(module, Decoder):
            register_fsdp_forward_method(module, "loss")

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout) -> Local:
        assert isinstance(weight, DTensor)
        return Local(name, axes, layout.split(0, *SHARDS), weight, weight.to_local().detach())

    def before_backward(self, *, is_last: bool) -> None:
        """Gradients stay whole until the last micro-batch, then are reduced as backward goes."""
        for module in self.modules:
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(is_last)

    def reduce(self) -> None:
        """Backward has summed over the data ranks; what is left is to hand the parts their gradients."""
        for local in self.everything:
            gradient = local.weight.grad
            local.part.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
            local.weight.grad = None
        self._sum_over_tensor_ranks()

    def after_step(self) -> None:
        """Let go of whole weights that a forward pass without a backward one (evaluation) has left: they are old now."""
        for module in self.modules:
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()


def wrap(plan: Plan, module: Decoder | Stage, mesh: Mesh, device: torch.device) -> None:
    """What a strategy does to a model or stage before its weights have memory."""
    if plan.is_fully_sharded:
        reshard = (plan.reshard or True) if plan.keeps_weights_cut else False
        FullySharded.wrap(module, mesh, device_type=device.type, reshard_after_forward=reshard)


def data_parallel(plan: Plan, modules: Sequence[nn.Module], mesh: Mesh, layouts: Mapping[str, Layout]) -> DataParallel:
    """The plan's strategy over what a rank holds, whose weights have memory."""
    if plan.is_fully_sharded:
        return FullySharded(modules, mesh, layouts)
    return (Replicated if plan.shard == 1 else Zero1)(modules, mesh, layouts)


def _padded(flat: Tensor, length: int) -> Tensor:
    return flat if flat.numel() == length else torch.cat((flat, flat.new_zeros(length - flat.numel())))
