"""The embedding's weight on two pipeline stages: its owner's on the first, and the copy that a tied head holds on the last.

The optimizer moves the owner's. Both are cut alike by the other axes, so a part's copy is the same part elsewhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.dist.mesh import Mesh
from surefoot.parallel.pipeline import EMBEDDING
from surefoot.parallel.plan import Plan
from surefoot.parallel.schedules import V_SHAPED
from surefoot.parallel.shard import DataParallel


class Copies:
    """Between the rank that owns the embedding and the one whose head holds a copy of it, which may be the same."""

    def __init__(self, plan: Plan, mesh: Mesh, data_parallel: DataParallel) -> None:
        self._group, self._here = mesh.group("pipeline"), mesh.index("pipeline")
        self._owner_rank, self._copy_rank = 0, 0 if plan.schedule in V_SHAPED else plan.pipeline - 1
        owned = {local.name: local.part for local in data_parallel.locals}
        copied = {local.name: local.part for local in data_parallel.copies}
        self._owner, self._copy = owned.get(EMBEDDING), copied.get(EMBEDDING)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the copy's gradient to the owner's, and drop it: no optimizer knows the copy."""
        gradient = None if self._copy is None else _gradient(self._copy)
        if self._copy is not None:
            self._copy.grad = None
        dtype = None if self._owner is None else self._owner.grad_dtype
        moved = self._move(gradient, self._owner, self._copy_rank, self._owner_rank, dtype)
        if self._owner is not None and moved is not None:
            self._owner.grad = _gradient(self._owner) + moved

    @torch.no_grad()
    def refresh(self) -> None:
        """Give the copy the owner's value."""
        moved = self._move(self._owner, self._copy, self._owner_rank, self._copy_rank)
        if self._copy is not None and moved is not None:
            self._copy.copy_(moved)

    def _move(
        self, sent: Tensor | None, like: Tensor | None, source: int, target: int, dtype: torch.dtype | None = None
    ) -> Tensor | None:
        """What `source` sends, on `target`."""
        if source == target:
            return sent
        if self._here == source and sent is not None:
            dist.send(sent.contiguous(), group=self._group, group_dst=target)
        if self._here == target and like is not None:
            received = torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)
            dist.recv(received, group=self._group, group_src=source)
            return received
        return None


def _gradient(part: Tensor) -> Tensor:
    return torch.zeros_like(part, dtype=part.grad_dtype) if part.grad is None else part.grad
