"""Weights that several pipeline stages use: their owners', and the copies that other stages keep (`pipeline.shared_weights`).

The optimizer moves the owner's. All are cut alike by the other axes, so a part's copy is the same part elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.dist.mesh import Mesh
from surefoot.parallel.pipeline import rank_of
from surefoot.parallel.plan import Plan
from surefoot.parallel.shard import DataParallel
from surefoot.parallel.stages import SharedWeight


class Copies:
    """Between the ranks that own weights and those that hold copies, which may be the same; `weights` is what `shared_weights`
    found."""

    def __init__(self, plan: Plan, mesh: Mesh, data_parallel: DataParallel, weights: Sequence[SharedWeight]) -> None:
        self._group, self._here = mesh.group("pipeline"), mesh.index("pipeline")
        owned = {local.name: local.part for local in data_parallel.locals}
        copied = {name: local.part for name, local in data_parallel.copies.items()}
        self._pairs = [
            (owned.get(one.owner), copied.get(one.copy), rank_of(plan, one.owner_stage), rank_of(plan, one.copy_stage))
            for one in weights
        ]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add each copy's gradient to the owner's, and drop it: no optimizer knows the copy."""
        for owner, copy, owner_rank, copy_rank in self._pairs:
            gradient = None if copy is None else _gradient(copy)
            if copy is not None:
                copy.grad = None
            dtype = None if owner is None else owner.grad_dtype
            moved = self._move(gradient, owner, copy_rank, owner_rank, dtype)
            if owner is not None and moved is not None:
                owner.grad = _gradient(owner) + moved

    @torch.no_grad()
    def refresh(self) -> None:
        """Give each copy the owner's value."""
        for owner, copy, owner_rank, copy_rank in self._pairs:
            moved = self._move(owner, copy, owner_rank, copy_rank)
            if copy is not None and moved is not None:
                copy.copy_(moved)

    def _move(
        self,
        sent: Tensor | None,
        like: Tensor | None,
        source: int | None,
        target: int | None,
        dtype: torch.dtype | None = None,
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
