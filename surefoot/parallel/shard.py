"""Data parallelism: who averages gradients and who holds which part of weights, gradients and optimizer state.

Every strategy sums gradients (the loss is divided by the step's token count beforehand), over the ranks that see other
samples or another part of the sequence. What differs is what each rank keeps:

    replicated   weights, gradients, state                      DDP (Li et al., 2020)
    ZeRO-1       weights, gradients; its part of the state      (Rajbhandari et al., 2020)
    ZeRO-2, 3    FSDP2: its part of all three; weights are gathered for a pass (2) or for a layer (3)

Weights and gradients may be of different numbers by role (`precision.policy.Types`); what travels together is of one. A unit of
FSDP2 can hold one kind: its largest. The others of a unit are kept as under ZeRO-1.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from surefoot.blocks.base import Block, Common, Experts
from surefoot.blocks.images import ImagePart
from surefoot.config import ConfigError
from surefoot.dist.collectives import gather_flat, reduce_scatter_flat, sum_all_
from surefoot.dist.layout import Layout
from surefoot.dist.mesh import Grid, Mesh
from surefoot.models.decoder import Decoder
from surefoot.models.initialise import named_weights
from surefoot.models.layers import named_layers
from surefoot.models.multimodal import Multimodal
from surefoot.parallel.plan import Plan
from surefoot.parallel.stages import ImageStage, Stage
from surefoot.precision.policy import DEFAULT, PrecisionConfig, Types

REPLICAS = ("replicate",)
SHARDS = ("shard", "expert", "context")
"""Axes over which ZeRO cuts: context-parallel ranks hold the same weights, so they share the keeping too."""

EXPERT_SHARDS = ("shard", "context")
"""The same for experts, where the `expert` ranks hold different ones."""


def shards_of(layout: Layout) -> tuple[str, ...]:
    """Axes over which ZeRO cuts one weight, and its gradient is summed: those that have not cut it already."""
    return tuple(axis for axis in SHARDS if not layout.is_cut_along(axis))


@dataclass
class Local:
    """A weight on this rank: `weight` computes, cut as `computed`; `part` is what the optimizer moves, cut as `layout` (the
    same tensor unless ZeRO-1)."""

    name: str
    axes: tuple[str, ...]
    computed: Layout
    layout: Layout
    weight: nn.Parameter
    part: Tensor
    types: Types


class DataParallel(ABC):
    """One strategy over this rank's part of a model: the whole, or the stages it holds.

    `copies` are weights that another stage owns, by the names they have here: treated like the others, but no optimizer moves
    them.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        precision: PrecisionConfig = DEFAULT,
    ) -> None:
        self.mesh, self.modules = mesh, modules
        self.locals: list[Local] = []
        self.copies: dict[str, Local] = {}
        for module in modules:
            owners = module.copies if isinstance(module, Stage | ImageStage) else {}
            for name, block, weight in named_weights(module):
                owner = owners.get(name, name)
                axes = block.axes[weight]
                local = self._local(owner, getattr(block, weight), axes, layouts[owner], precision.types_of(axes))
                if name in owners:
                    self.copies[name] = local
                else:
                    self.locals.append(local)

    @property
    def everything(self) -> list[Local]:
        """What is owned and what is copied, in an order that all ranks with these stages share."""
        return [*self.locals, *self.copies.values()]

    @abstractmethod
    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout, types: Types) -> Local:
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

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout, types: Types) -> Local:
        weight.grad_dtype = types.accumulate
        return Local(name, axes, layout, layout, weight, weight, types)

    def reduce(self) -> None:
        """One sum over all data ranks."""
        _sum_gradients(self.everything, self.mesh.group(*REPLICAS, *SHARDS))
        self._sum_over_tensor_ranks()


class Zero1(DataParallel):
    """Weights and gradients whole, optimizer state and update cut along the first dimension."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        precision: PrecisionConfig = DEFAULT,
    ) -> None:
        super().__init__(modules, mesh, layouts, precision)
        self._families = _Families(mesh, self.everything)

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout, types: Types) -> Local:
        return _with_part(self.mesh, name, weight, axes, layout, types)

    def reduce(self) -> None:
        """Sum over replicas, then each rank receives the sums of its parts: one reduce-scatter of all weights cut alike."""
        self._families.reduce()
        self._sum_over_tensor_ranks()

    def after_step(self) -> None:
        """One all-gather of all parts cut alike."""
        self._families.gather()


def _with_part(
    mesh: Mesh, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout, types: Types
) -> Local:
    """A weight that is whole, of which this rank's optimizer moves some rows."""
    shards = shards_of(layout)
    part = weight.detach()[_rows_of(weight, mesh.size(*shards))[mesh.index(*shards)]]
    weight.grad_dtype = part.grad_dtype = types.accumulate
    return Local(name, axes, layout, layout.split(0, *shards), weight, part, types)


def _sum_gradients(members: Iterable[Local], group: ProcessGroup | None) -> None:
    """Gradients of whole weights over ranks, in the numbers of their roles."""
    narrow: list[tuple[Tensor, Tensor]] = []
    gradients: list[Tensor] = []
    for local in members:
        found = local.weight.grad
        if found is None or group is None:
            continue
        sent = found.to(local.types.reduce)
        gradients.append(sent)
        if sent is not found:
            narrow.append((found, sent))
    sum_all_(gradients, group)
    for found, sent in narrow:
        found.copy_(sent)


class _Families:
    """Whole weights by what travels together."""

    def __init__(self, mesh: Mesh, members: Sequence[Local]) -> None:
        self._members, self._replicas = members, mesh.group(*REPLICAS)
        self._families = [
            _Family(mesh, axes, types, [local.weight for local in alike], [local.part for local in alike])
            for (axes, types), alike in _by_shards(members).items()
        ]

    @torch.no_grad()
    def reduce(self) -> None:
        """Sums of gradients to the parts."""
        _sum_gradients(self._members, self._replicas)
        for family in self._families:
            family.reduce()

    @torch.no_grad()
    def gather(self) -> None:
        """Parts to whole weights."""
        for family in self._families:
            family.gather()


class _Family:
    """Weights whose rows are shared out over the same ranks, which travel together: of each every rank's rows, and the numbers
    in the largest part, to which what travels is padded."""

    def __init__(
        self, mesh: Mesh, axes: tuple[str, ...], types: Types, weights: list[nn.Parameter], parts: list[Tensor]
    ) -> None:
        self.weights, self.parts, self.types = weights, parts, types
        self.group, self.num_ranks = mesh.group(*axes), mesh.size(*axes)
        self.rows = [_rows_of(weight, self.num_ranks) for weight in weights]
        self.runs = [
            rows[0].stop * math.prod(weight.shape[1:]) for rows, weight in zip(self.rows, weights, strict=True)
        ]

    def reduce(self) -> None:
        """Sums of gradients to the parts. What nothing reads has none, and no part of it is moved."""
        live = [member for member in zip(self.weights, self.parts, self.runs, strict=True) if member[0].requires_grad]
        if self.num_ranks == 1:  # experts that no other rank holds: a part is all of the weight
            for weight, part, _ in live:
                part.grad, weight.grad = self._gradient(weight), None
            return
        if not live:
            return
        by_rank = torch.cat([self._by_rank(weight, run) for weight, _, run in live], 1)
        own = by_rank.new_empty(by_rank.shape[1])
        reduce_scatter_flat(own, by_rank.flatten(), group=self.group)
        for (weight, part, _), piece in zip(live, own.split([run for *_, run in live]), strict=True):
            part.grad = piece[: part.numel()].view_as(part).to(self.types.accumulate)
            weight.grad = None

    def gather(self) -> None:
        """Parts to whole weights, of which a rank's own part is a view."""
        if self.num_ranks == 1:
            return
        own = torch.cat([_padded(part.reshape(-1), run) for part, run in zip(self.parts, self.runs, strict=True)])
        whole = own.new_empty((self.num_ranks, own.numel()))
        gather_flat(whole.view(-1), own, group=self.group)
        for weight, rows, by_rank in zip(self.weights, self.rows, whole.split(self.runs, 1), strict=True):
            for cut, run in zip(rows, by_rank, strict=True):
                target = weight.detach()[cut]
                target.copy_(run[: target.numel()].view_as(target))

    def _gradient(self, weight: Tensor) -> Tensor:
        return torch.zeros_like(weight, dtype=self.types.accumulate) if weight.grad is None else weight.grad

    def _by_rank(self, weight: Tensor, run: int) -> Tensor:
        """The gradient as one row for each rank, the last ones padded."""
        flat = self._gradient(weight).reshape(-1).to(self.types.reduce)
        return _padded(flat, self.num_ranks * run).view(self.num_ranks, run)


def _by_shards(members: Iterable[Local]) -> dict[tuple[tuple[str, ...], Types], list[Local]]:
    """Weights by the axes over which they are shared out and by their numbers, in an order that all ranks share."""
    found: dict[tuple[tuple[str, ...], Types], list[Local]] = {}
    for local in members:
        # ZeRO-1's own cut of a part is the last; what cut the weight before it decides.
        found.setdefault((shards_of(local.computed), local.types), []).append(local)
    return found


def _rows_of(weight: Tensor, num_ranks: int) -> list[slice]:
    """Each rank's rows of a weight that other axes have cut already."""
    cut, grid = Layout(tuple(weight.shape)).split(0, "shard"), Grid({"shard": num_ranks})
    return [cut.box(grid, grid.coordinates(rank)).slices[0] for rank in range(num_ranks)]


class FullySharded(DataParallel):
    """FSDP2 (Zhao et al., 2023) over the data ranks, one unit a layer, one for what several layers have in common and one for
    what surrounds them; under expert parallelism also one for each layer's experts, over the ranks that hold the same ones."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: Mesh,
        layouts: Mapping[str, Layout],
        precision: PrecisionConfig = DEFAULT,
    ) -> None:
        super().__init__(modules, mesh, layouts, precision)
        self._families = _Families(mesh, [local for local in self.everything if not isinstance(local.weight, DTensor)])

    @staticmethod
    def wrap(
        module: Decoder | Multimodal | Stage | ImageStage,
        mesh: Mesh,
        precision: PrecisionConfig,
        *,
        device_type: str,
        reshard_after_forward: bool | int,
    ) -> None:
        """Make FSDP2 units of a model or stage that may still be on meta."""
        replicas = (REPLICAS,) if mesh.size(*REPLICAS) > 1 else ()
        data_mesh = mesh.device_mesh(device_type, *replicas, SHARDS)
        unread = module.unread() if isinstance(module, Multimodal | ImageStage) else []
        layers = [layer for _, layer in named_layers(module)]
        units: list[tuple[nn.Module, DeviceMesh]] = [(unit, data_mesh) for unit in (*layers, *unread, module)]
        if mesh.size("expert") > 1:
            expert_mesh = mesh.device_mesh(device_type, *replicas, EXPERT_SHARDS)
            experts = [block for block in module.modules() if isinstance(block, Experts)]
            units = [*((block, expert_mesh) for block in experts), *units]
        units = [*((part, data_mesh) for part in module.modules() if isinstance(part, Common)), *units]
        # What a layer leaves for later ones may be a view: values are a part of one product. FSDP2 warns of writing into it, and
        # nothing does.
        warnings.filterwarnings(
            "ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning
        )
        # Before the first is wrapped: wrapping replaces weights.
        kinds = _types_by_weight(module, precision)
        kept: list[Types | None] = []
        met: set[nn.Parameter] = set()
        ignored: set[nn.Parameter] = set()
        for unit, _ in units:
            own = set(unit.parameters()) - met
            met |= own
            kept.append(_largest_kind([(weight, kinds[weight]) for weight in own]))
            ignored |= {weight for weight in own if kinds[weight] != kept[-1]}
        for (unit, device_mesh), types in zip(units, kept, strict=True):
            fully_shard(
                unit,
                mesh=device_mesh,
                reshard_after_forward=unit is not module and reshard_after_forward,
                ignored_params=ignored,
            )
            assert isinstance(unit, FSDPModule)
            if types is not None and precision.is_narrow:
                unit.register_forward_pre_hook(_AddsUpIn(types.accumulate))
            # The loss is divided by the step's tokens before backward: ranks add up. gloo has no scaled sum.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if isinstance(module, Decoder | Multimodal):
            register_fsdp_forward_method(module, "loss")
        for part in module.modules():
            for name in part.entries if isinstance(part, ImagePart) else ():
                register_fsdp_forward_method(part, name)

    def _local(self, name: str, weight: nn.Parameter, axes: tuple[str, ...], layout: Layout, types: Types) -> Local:
        if not isinstance(weight, DTensor):
            return _with_part(self.mesh, name, weight, axes, layout, types)
        part = weight.to_local().detach()
        weight.grad_dtype = part.grad_dtype = types.accumulate
        return Local(name, axes, layout, layout.split(0, *shards_of(layout)), weight, part, types)

    def before_backward(self, *, is_last: bool) -> None:
        """Gradients stay whole until the last micro-batch, then are reduced as backward goes."""
        for module in self.modules:
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(is_last)

    def reduce(self) -> None:
        """Backward has summed over the data ranks; what is left is to hand the parts their gradients."""
        for local in self.everything:
            if isinstance(local.weight, DTensor):
                gradient = local.weight.grad
                local.part.grad = gradient.to_local() if isinstance(gradient, DTensor) else None
                local.weight.grad = None
        self._families.reduce()
        self._sum_over_tensor_ranks()

    def after_step(self) -> None:
        """Let go of whole weights that a forward pass without a backward one (evaluation) has left: they are old now."""
        for module in self.modules:
            for unit in module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()
        self._families.gather()


class _AddsUpIn:
    """Before a unit's forward pass, when FSDP2 has gathered its weights: their gradients are of this dtype, until they reach the
    parts. FSDP2 by itself would bring them to the weights' own dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, unit: nn.Module, _arguments: object) -> None:
        state = unit._get_fsdp_state()  # type: ignore[operator]
        # torch 2.13 has several groups a unit, earlier versions one.
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in groups:
            group._orig_dtype = self.dtype
            for one in group.fsdp_params:
                one.unsharded_param.grad_dtype = self.dtype


def _types_by_weight(module: nn.Module, precision: PrecisionConfig) -> dict[nn.Parameter, Types]:
    return {
        getattr(block, name): precision.types_of(axes)
        for block in module.modules()
        if isinstance(block, Block)
        for name, axes in block.axes.items()
    }


def _largest_kind(weights: Sequence[tuple[nn.Parameter, Types]]) -> Types | None:
    """The types that most numbers of a unit have; None where it has no weights."""
    sizes: dict[Types, int] = {}
    for weight, types in weights:
        sizes[types] = sizes.get(types, 0) + weight.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else None


def check(plan: Plan, precision: PrecisionConfig) -> None:
    """`ConfigError` where FSDP2 would add up otherwise than asked for."""
    if plan.is_fully_sharded and precision.reduce is not None and precision.accumulate is None:
        raise ConfigError(
            "precision.reduce",
            precision.reduce,
            f"with plan.zero={plan.zero} makes micro-batches add up in it too; say so by precision.accumulate=bf16, or use "
            "plan.zero=1",
        )


def wrap(
    plan: Plan,
    module: Decoder | Multimodal | Stage | ImageStage,
    mesh: Mesh,
    device: torch.device,
    precision: PrecisionConfig,
) -> None:
    """What a strategy does to a model or stage before its weights have memory."""
    if plan.is_fully_sharded:
        reshard = (plan.reshard or True) if plan.keeps_weights_cut else False
        FullySharded.wrap(module, mesh, precision, device_type=device.type, reshard_after_forward=reshard)


def data_parallel(
    plan: Plan,
    modules: Sequence[nn.Module],
    mesh: Mesh,
    layouts: Mapping[str, Layout],
    precision: PrecisionConfig = DEFAULT,
) -> DataParallel:
    """The plan's strategy over what a rank holds, whose weights have memory."""
    if plan.is_fully_sharded:
        return FullySharded(modules, mesh, layouts, precision)
    return (Zero1 if plan.is_sharded else Replicated)(modules, mesh, layouts, precision)


def _padded(flat: Tensor, length: int) -> Tensor:
    return flat if flat.numel() == length else torch.cat((flat, flat.new_zeros(length - flat.numel())))
