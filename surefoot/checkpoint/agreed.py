"""Ranks act on a checkpoint together: what fails on one fails on all, with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup

from surefoot.config import CheckpointError
from surefoot.dist.objects import all_objects

T = TypeVar("T")


def together(action: Callable[[], T], group: ProcessGroup | None) -> T:
    """Act on every rank; the `CheckpointError` of the lowest rank that has one is raised on all. `action` is local."""
    failure, results = None, []
    try:
        results.append(action())
    except CheckpointError as error:
        failure = str(error)
    for rank, said in enumerate(all_objects(failure, group)):
        if said is not None:
            raise CheckpointError(said if rank == 0 else f"{said} (rank {rank})")
    return results[0]
