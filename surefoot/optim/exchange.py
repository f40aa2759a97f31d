"""Whole matrices from parts and back, for optimizers that need them whole.

Each matrix has one owner among the ranks that share it; work is balanced over owners. Matrices travel in a few rounds: in each,
the parts of every owner's next few go out in one all-to-all and their updates come back in another, so that a round is on its
way while the one before it is worked on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.dist.layout import Box, Layout, Place
from surefoot.dist.mesh import Mesh

NUM_ROUNDS = 4
"""What work cannot hide is the first round's way out and the last one's back: half of all in 2 rounds, a quarter in 4.
More make messages small."""

AXES = ("shard", "expert", "context", "tensor")
"""Axes that may cut a weight. Ranks along the others hold copies, and each set of them does the work for itself."""

_Arrival = Callable[[], list[list[Tensor]]]
"""Waits for what is on its way: tensors from each rank."""


class Exchange:
    """Over matrices of fixed places; the same order on every rank."""

    def __init__(self, mesh: Mesh, places: Sequence[Place], costs: Sequence[float]) -> None:
        self.group = mesh.group(*AXES)
        self.rank, num_ranks = mesh.index(*AXES), mesh.size(*AXES)
        self.shapes = [place.shape for place in places]
        self.owners = balanced(costs, num_ranks)
        peers = [mesh.grid.coordinates(rank) for rank in mesh.grid.peers(mesh.rank, AXES)]
        # Where each rank's part lies, and whether it is the copy that is sent: ranks along an uncut axis hold equal ones.
        layouts = {place.layout for place in places}  # few: most matrices are cut alike
        boxes = {layout: [layout.box(mesh.grid, peer) for peer in peers] for layout in layouts}
        sends = {layout: [sends_copy(layout, peer) for peer in peers] for layout in layouts}
        self.boxes = [boxes[place.layout] for place in places]
        self.sends = [sends[place.layout] for place in places]
        owned = [[number for number, owner in enumerate(self.owners) if owner == rank] for rank in range(num_ranks)]
        self._rounds = [
            _Round(self, mine)
            for mine in zip(*(_chunks(numbers, NUM_ROUNDS) for numbers in owned), strict=True)
            if any(mine)
        ]

    def apply(
        self,
        parts: Sequence[Tensor],
        update: Callable[[list[Tensor]], list[Tensor]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Tensor]:
        """This rank's part of `update` of the whole matrices; `update` is given those that this rank owns, a round at a time.
        `meanwhile` is called once, while the first are on their way."""
        arrivals = [self._rounds[0].send(parts)]
        meanwhile()
        returns = []
        for number, each in enumerate(self._rounds):
            if number + 1 < len(self._rounds):
                arrivals.append(self._rounds[number + 1].send(parts))
            whole = each.whole(arrivals.pop(0)(), parts[0])
            returns.append(each.send_back(update(whole), parts[0]))
        found = {n: part for each, back in zip(self._rounds, returns, strict=True) for n, part in each.back(back())}
        return [found[number] for number in range(len(parts))]


class _Round:
    """The matrices that travel together: some of each owner's."""

    def __init__(self, exchange: Exchange, owned: Sequence[list[int]]) -> None:
        self._exchange, self._owned = exchange, owned
        self._ranks, self._mine = range(len(owned)), owned[exchange.rank]

    def send(self, parts: Sequence[Tensor]) -> _Arrival:
        """Parts to the owners."""
        boxes, sends, rank = self._exchange.boxes, self._exchange.sends, self._exchange.rank
        return self._all_to_all(
            [[parts[number] for number in owned if sends[number][rank]] for owned in self._owned],
            [[boxes[number][peer] for number in self._mine if sends[number][peer]] for peer in self._ranks],
            parts[0],
        )

    def whole(self, received: list[list[Tensor]], like: Tensor) -> list[Tensor]:
        """The matrices of this rank."""
        boxes, sends = self._exchange.boxes, self._exchange.sends
        whole = {number: like.new_empty(self._exchange.shapes[number]) for number in self._mine}
        for peer in self._ranks:
            sources = iter(received[peer])
            for number in self._mine:
                if sends[number][peer]:
                    whole[number][boxes[number][peer].slices] = next(sources)
        return list(whole.values())

    def send_back(self, updates: Sequence[Tensor], like: Tensor) -> _Arrival:
        """The parts of this rank's updates to those who hold them."""
        boxes = self._exchange.boxes
        updated = {number: tensor.to(like.dtype) for number, tensor in zip(self._mine, updates, strict=True)}
        return self._all_to_all(
            [[updated[number][boxes[number][peer].slices] for number in self._mine] for peer in self._ranks],
            [[boxes[number][self._exchange.rank] for number in owned] for owned in self._owned],
            like,
        )

    def back(self, returned: list[list[Tensor]]) -> Iterator[tuple[int, Tensor]]:
        """This rank's part of every update, with the matrix's number."""
        for owned, pieces in zip(self._owned, returned, strict=True):
            yield from zip(owned, pieces, strict=True)

    def _all_to_all(self, sent: list[list[Tensor]], expected: list[list[Box]], like: Tensor) -> _Arrival:
        """Start sending tensors for each rank; what is called for tensors of the expected boxes from each rank."""
        empty = like.new_empty(0)
        outgoing = [torch.cat([empty, *(tensor.reshape(-1) for tensor in tensors)]) for tensors in sent]
        sizes = [sum(box.num_elements for box in boxes) for boxes in expected]
        incoming, flat = like.new_empty(sum(sizes)), torch.cat(outgoing)
        work = dist.all_to_all_single(
            incoming, flat, sizes, [tensor.numel() for tensor in outgoing], group=self._exchange.group, async_op=True
        )
        alive = [flat]  # the transfer reads it until it ends

        def wait() -> list[list[Tensor]]:
            if work is not None:
                work.wait()
            alive.clear()
            return [
                [
                    piece.view(box.shape)
                    for piece, box in zip(run.split([b.num_elements for b in boxes]), boxes, strict=True)
                ]
                for run, boxes in zip(incoming.split(sizes), expected, strict=True)
            ]

        return wait


def _chunks(numbers: Sequence[int], num_chunks: int) -> list[list[int]]:
    """In order, as even as can be; some are empty where there are fewer numbers than chunks."""
    return [
        list(numbers[len(numbers) * each // num_chunks : len(numbers) * (each + 1) // num_chunks])
        for each in range(num_chunks)
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
