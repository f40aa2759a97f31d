"""Small Python objects between the ranks of one job, which trust one another. A group of None stands for one rank."""

from __future__ import annotations

from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

T = TypeVar("T")


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's number in the group."""
    return 0 if group is None else dist.get_rank(group)


def num_ranks_in(group: ProcessGroup | None) -> int:
    """Number of ranks of the group."""
    return 1 if group is None else dist.get_world_size(group)


def all_objects(value: T, group: ProcessGroup | None) -> list[T]:
    """What every rank brought, by rank, on every rank."""
    if group is None:
        return [value]
    found: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, value, group=group)
    return cast(list[T], found)


def objects_at_first(value: T, group: ProcessGroup | None) -> list[T] | None:
    """What every rank brought, by rank, on the group's first rank; None on others."""
    if group is None:
        return [value]
    found: list[T | None] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(value, found, group=group, group_dst=0)
    return cast("list[T] | None", found)


def first_object(value: T, group: ProcessGroup | None) -> T:
    """What the group's first rank brought, on every rank."""
    if group is None:
        return value
    found = [value if dist.get_rank(group) == 0 else None]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return cast(T, found[0])
