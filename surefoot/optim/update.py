"""How far a step moves the weights, measured on a sample of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from surefoot.dist.collectives import sum_
from surefoot.optim.base import Param, Role
from surefoot.optim.groups import split_by_role

NUM_ENTRIES = 4_096


class UpdateMeter:
    """rms(update) / rms(weight) by role, from at most `num_entries` evenly spaced entries of each weight. Reads only.

    Call `before` and `after` around an optimizer step. Over the ranks of a group each part that counts is sampled.
    """

    def __init__(
        self, params: Sequence[Param], num_entries: int = NUM_ENTRIES, group: ProcessGroup | None = None
    ) -> None:
        self._num_entries, self._group = num_entries, group
        self._roles = {
            role: [param for param in members if param.place is None or param.place.counts]
            for role, members in split_by_role(params).items()
        }
        self._before: dict[Role, list[Tensor]] = {}

    @torch.no_grad()
    def before(self) -> None:
        """Remember the entries as they are."""
        for role, members in self._roles.items():
            entries = [_sample(param.tensor, self._num_entries) for param in members]
            if role not in self._before:
                self._before[role] = [torch.empty_like(entry) for entry in entries]
            if entries:
                torch._foreach_copy_(self._before[role], entries)

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """The ratio by role since `before`, over the weights as they are now; 0 for a role whose weights are all 0."""
        if not self._before:
            raise RuntimeError("UpdateMeter.after needs a call of before")
        sums: list[float] = []
        for role, members in self._roles.items():
            entries, moved = [_sample(param.tensor, self._num_entries) for param in members], self._before[role]
            if entries:
                torch._foreach_sub_(moved, entries)
            counts = [param.tensor.numel() for param in members]
            sums += [_sum_of_squares(moved, counts), _sum_of_squares(entries, counts)]
        if self._group is not None:
            sums = sum_(torch.tensor(sums, dtype=torch.float64), self._group).tolist()
        pairs = zip(sums[::2], sums[1::2], strict=True)
        return {
            role: math.sqrt(moved / size) if size else 0.0
            for role, (moved, size) in zip(self._roles, pairs, strict=True)
        }


def _sample(tensor: Tensor, num_entries: int) -> Tensor:
    """At most `num_entries` entries of `tensor`, a view where it is contiguous."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, -(-flat.numel() // num_entries))
    # A stride that shares a factor with the rows' length would see the same few columns of every row.
    while stride > 1 and tensor.dim() > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return flat[::stride]


def _sum_of_squares(samples: Sequence[Tensor], counts: Sequence[int]) -> float:
    """Of the full weights of which these are samples."""
    if not samples:
        return 0.0
    norms = torch.stack(torch._foreach_norm(list(samples))).tolist()
    return sum(
        norm**2 * count / len(sample) if count else 0.0
        for norm, count, sample in zip(norms, counts, samples, strict=True)
    )
