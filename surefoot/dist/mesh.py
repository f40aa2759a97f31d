"""The grid of ranks: named axes, each rank's coordinates, and one process group for every set of axes that is asked for.

The grid is row-major with the axes in the order of `AXES`: the last varies fastest, so that tensor-parallel ranks, which
talk most, are neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

AXES = ("pipeline", "replicate", "shard", "expert", "context", "tensor")
DATA = ("replicate", "shard", "expert")
"""Axes along which ranks see different samples."""

GROUPS = (
    ("pipeline",),
    ("replicate",),
    ("expert",),
    ("context",),
    ("tensor",),
    ("shard", "context"),
    ("shard", "expert", "context"),
    ("shard", "expert", "context", "tensor"),
    ("replicate", "shard", "context"),
    ("replicate", "shard", "expert", "context"),
    AXES,
)
"""Every set of axes along which something is ever communicated."""

# Groups live as long as their process: a mesh built again over the same ranks finds its groups here.
_GROUPS: dict[tuple[int, ...], ProcessGroup] = {}


@dataclass(frozen=True)
class Grid:
    """Sizes of the axes; knows every rank's place without any process group."""

    sizes: Mapping[str, int]

    def __post_init__(self) -> None:
        if unknown := set(self.sizes) - set(AXES):
            raise ValueError(f"no such axis: {sorted(unknown)[0]}")

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all."""
        return self.size(*AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """A rank's index along each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at `coordinates`; an axis left out counts as 0."""
        number = 0
        for axis in AXES:
            number = number * self.size(axis) + coordinates.get(axis, 0)
        return number

    def index(self, coordinates: Mapping[str, int], axes: Sequence[str]) -> int:
        """The index along `axes` together, the last varying fastest."""
        number = 0
        for axis in axes:
            number = number * self.size(axis) + coordinates.get(axis, 0)
        return number

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axes`, by their index along them."""
        own = self.coordinates(rank)
        ranges = [range(self.size(axis)) for axis in axes]
        return tuple(self.rank(own | dict(zip(axes, indexes, strict=True))) for indexes in itertools.product(*ranges))


class Mesh:
    """A grid seen from one rank, with process groups. All ranks must ask for the same groups in the same order."""

    def __init__(self, grid: Grid, rank: int = 0) -> None:
        self.grid, self.rank = grid, rank
        self.coordinates = grid.coordinates(rank)

    def size(self, *axes: str) -> int:
        """Number of ranks along `axes` together."""
        return self.grid.size(*axes)

    def index(self, *axes: str) -> int:
        """This rank's index along `axes` together."""
        return self.grid.index(self.coordinates, axes)

    def group(self, *axes: str) -> ProcessGroup | None:
        """The group of this rank's peers along `axes`; None where it is alone there."""
        return self._group(axes) if self.size(*axes) > 1 else None

    def device_mesh(self, device_type: str, *parts: tuple[str, ...]) -> DeviceMesh:
        """A torch mesh with one dimension for each part, a part being one axis or several flattened."""
        axes = [axis for part in parts for axis in part]
        ranks = torch.tensor(self.grid.peers(self.rank, axes)).view([self.size(*part) for part in parts])
        groups = [self._group(part) for part in parts]
        names = tuple("_".join(part) for part in parts)
        if len(parts) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=names)

    def _group(self, axes: Sequence[str]) -> ProcessGroup:
        if tuple(axes) not in GROUPS:
            raise ValueError(f"{axes} is not among the groups of a mesh; add it to GROUPS")
        ranks = self.grid.peers(self.rank, axes)
        if ranks not in _GROUPS:
            # Only the members take part: a cluster has far more groups than any rank is in.
            _make_group(ranks, use_local_synchronization=True)
        return _GROUPS[ranks]


def make_all_groups(grid: Grid) -> None:
    """Make every group of a grid that may be smaller than the world; all ranks of the world call this together.

    For ranks that serve one grid after another: torch names a group that only its members make after how many groups each
    of them has made before, which then differs between them, and they would wait for one another forever. For the same
    reason the ranks first agree on torch's count, which FSDP2 raises where it makes groups of its own.
    """
    count = torch.tensor(distributed_c10d._world.group_count)
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    distributed_c10d._world.group_count = int(count)
    for axes in GROUPS:
        for ranks in dict.fromkeys(grid.peers(rank, axes) for rank in range(grid.num_ranks)):
            if ranks not in _GROUPS:
                _make_group(ranks, use_local_synchronization=False)


def own_mesh(grid: Grid) -> Mesh | None:
    """A grid seen from this rank of a world that may be larger; None where the grid does not use it.

    All ranks of the world call it together, with the same grid. Without a process group this is rank 0 of one.
    """
    if not dist.is_initialized():
        return Mesh(grid)
    make_all_groups(grid)
    return Mesh(grid, dist.get_rank()) if dist.get_rank() < grid.num_ranks else None


def _make_group(ranks: tuple[int, ...], *, use_local_synchronization: bool) -> None:
    is_world = ranks == tuple(range(dist.get_world_size()))
    group = (
        dist.group.WORLD
        if is_world
        else dist.new_group(list(ranks), use_local_synchronization=use_local_synchronization)
    )
    # A rank that is not a member gets a placeholder; it is kept so that every rank's record of what exists is the same.
    _GROUPS[ranks] = cast(ProcessGroup, group)


def forget_groups() -> None:
    """Drop every group made so far, after the process group they belong to was destroyed."""
    _GROUPS.clear()
