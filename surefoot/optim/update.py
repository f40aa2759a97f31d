"""How far a step moves the weights, measured on a sample of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from surefoot.dist.collectives import sum_
from surefoot.optim.base import Param, Role
from surefoot.optim.groups import ROLES, split_by_role

NUM_ENTRIES = 4_096


class UpdateMeter:
    """rms(update) / rms(weight) by role, from at most `num_entries` evenly spaced entries of each weight. Reads only.

    Call `before` and `after` around an optimizer step. Over the ranks of a group each part that counts is sampled.
    """

    def __init__(
        self, params: Sequence[Param], num_entries: int = NUM_ENTRIES, group: ProcessGroup | None = None
    ) -> None:
        self._num_entries, self._group = num_entries, group
        split = split_by_role(params)
        # Over ranks every role is summed, also one that lies on other pipeline stages only.
        roles = split if group is None else ROLES
        self._roles = {role: [param for param in split.get(role, ()) if param.counts] for role in roles}
        # Each sampled entry stands for this many of its weight's.
        self._shares = {role: self._share_of_entries(members) for role, members in self._roles.items()}
        self._before: dict[Role, Tensor] = {}

    @torch.no_grad()
    def before(self) -> None:
        """Remember the entries as they are."""
        self._before = {role: self._entries(members) for role, members in self._roles.items()}

    @torch.no_grad()
    def after(self) -> dict[str, float]:
        """The ratio by role since `before`, over the weights as they are now; 0 for a role whose weights are all 0."""
        if not self._before:
            raise RuntimeError("UpdateMeter.after needs a call of before")
        sums = []
        for role, members in self._roles.items():
            entries, shares = self._entries(members), self._shares[role]
            moved = entries - self._before[role]
            sums += [torch.dot(moved.square_(), shares), torch.dot(entries.square_(), shares), shares.sum()]
        totals = torch.stack([total.to(torch.float64) for total in sums])
        found = sum_(totals, self._group).tolist()
        rows = zip(self._roles, found[::3], found[1::3], found[2::3], strict=True)
        return {
            role: math.sqrt(moved / size) if size else 0.0 for role, moved, size, num_entries in rows if num_entries
        }

    def _entries(self, members: Sequence[Param]) -> Tensor:
        samples = [_sample(param.tensor, self._num_entries) for param in members]
        return torch.cat(samples) if samples else torch.zeros(0)

    def _share_of_entries(self, members: Sequence[Param]) -> Tensor:
        samples = [_sample(param.tensor, self._num_entries) for param in members]
        shares = [
            sample.new_full((len(sample),), param.tensor.numel() / max(1, len(sample)))
            for sample, param in zip(samples, members, strict=True)
        ]
        return torch.cat(shares) if shares else torch.zeros(0)


def _sample(tensor: Tensor, num_entries: int) -> Tensor:
    """At most `num_entries` entries of `tensor`, in at least fp32; a view where it can be."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, -(-flat.numel() // num_entries))
    # A stride that shares a factor with the rows' length would see the same few columns of every row.
    while stride > 1 and tensor.dim() > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1
    return flat[::stride].to(torch.promote_types(flat.dtype, torch.float32))
