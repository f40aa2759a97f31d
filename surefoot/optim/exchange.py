"""Whole matrices from parts and back, for optimizers that need them whole.

Each matrix has one owner among the ranks that share it; work is balanced over owners. All parts of all matrices travel in
one all-to-all, and all updates in another, however many matrices there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.dist.layout import Box, Layout, Place
from surefoot.dist.mesh import Mesh

AXES = ("shard", "expert", "context", "tensor")
"""Axes that may cut a weight. Ranks along the others hold copies, and each set of them does the work for itself."""


class Exchange:
    """Over matrices of fixed places; the same order on every rank."""

    def __init__(self, mesh: Mesh, places: Sequence[Place], costs: Sequence[float]) -> None:
        self._group = mesh.group(*AXES)
        self._rank, num_ranks = mesh.index(*AXES), mesh.size(*AXES)
        self.shapes = [place.shape for place in places]
        self.owners = balanced(costs, num_ranks)
        peers = [mesh.grid.coordinates(rank) for rank in mesh.grid.peers(mesh.rank, AXES)]
        # Where each rank's part lies, and whether it is the copy that is sent: ranks along an uncut axis hold equal ones.
        layouts = {place.layout for place in places}  # few: most matrices are cut alike
        boxes = {layout: [layout.box(mesh.grid, peer) for peer in peers] for layout in layouts}
        sends = {layout: [sends_copy(layout, peer) for peer in peers] for layout in layouts}
        self._boxes = [boxes[place.layout] for place in places]
        self._sends = [sends[place.layout] for place in places]
        self._owned = [
            [number for number, owner in enumerate(self.owners) if owner == rank] for rank in range(num_ranks)
        ]

    def apply(self, parts: Sequence[Tensor], update: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """This rank's part of `update` of the whole matrices; `update` is given those that this rank owns."""
        ranks, mine = range(len(self._owned)), self._owned[self._rank]
        sent = [[parts[number] for number in owned if self._sends[number][self._rank]] for owned in self._owned]
        expected = [[self._boxes[number][rank] for number in mine if self._sends[number][rank]] for rank in ranks]
        like = parts[0].new_empty(0)
        received = self._all_to_all(sent, expected, like)
        whole = {number: parts[0].new_empty(self.shapes[number]) for number in mine}
        for rank in ranks:
            sources = iter(received[rank])
            for number in mine:
                if self._sends[number][rank]:
                    whole[number][self._boxes[number][rank].slices] = next(sources)
        updates = [tensor.to(like.dtype) for tensor in update([whole[number] for number in mine])]
        updated = dict(zip(mine, updates, strict=True))
        returned = self._all_to_all(
            [[updated[number][self._boxes[number][rank].slices] for number in mine] for rank in ranks],
            [[self._boxes[number][self._rank] for number in owned] for owned in self._owned],
            like,
        )
        found = {
            n: part
            for owned, back in zip(self._owned, returned, strict=True)
            for n, part in zip(owned, back, strict=True)
        }
        return [found[number] for number in range(len(parts))]

    def _all_to_all(self, sent: list[list[Tensor]], expected: list[list[Box]], like: Tensor) -> list[list[Tensor]]:
        """Tensors for each rank out; tensors of the expected boxes from each rank in."""
        outgoing = [torch.cat([like, *(tensor.reshape(-1) for tensor in tensors)]) for tensors in sent]
        sizes = [sum(box.num_elements for box in boxes) for boxes in expected]
        incoming = like.new_empty(sum(sizes))
        dist.all_to_all_single(
            incoming, torch.cat(outgoing), sizes, [tensor.numel() for tensor in outgoing], group=self._group
        )
        return [
            [
                piece.view(box.shape)
                for piece, box in zip(run.split([b.num_elements for b in boxes]), boxes, strict=True)
            ]
            for run, boxes in zip(incoming.split(sizes), expected, strict=True)
        ]


def sends_copy(layout: Layout, coordinates: Mapping[str, int]) -> bool:
    """Whether the rank at `coordinates` sends its part: of ranks along an uncut axis, which hold equal ones, the first does."""
    return layout.counts_at({**coordinates, "replicate": 0})


def balanced(costs: Sequence[float], num_owners: int) -> list[int]:
    """An owner for each cost: the largest first, each to the owner with the least so far."""
    loads, owners = [0.0] * num_owners, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        owner = min(range(num_owners), key=lambda candidate: (loads[candidate], candidate))
        owners[number] = owner
        loads[owner] += costs[number]
    return owners
