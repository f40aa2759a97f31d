"""What softmax attention keeps of the past. Legend: B batch, L new positions, S positions seen, P places, X whatever follows."""

from __future__ import annotations

import torch
from torch import Tensor

from surefoot.ops.documents import Reach


def most_kept(reach: Reach, length: int) -> int:
    """How many of `length` positions a state keeps, which is how many the last of them sees."""
    return length if reach.most is None else min(length, reach.most)


def mean_seen(reach: Reach, length: int) -> float:
    """How many positions the tokens of one document of `length` see on average."""
    most = most_kept(reach, length)
    return (most * (most + 1) / 2 + (length - most) * most) / length


class State:
    """Buffers with a place for each position or, where `reach` is bounded, for each position in reach.

    Then the first positions have places of their own, and the others follow each other round a ring.
    """

    def __init__(
        self, shapes: tuple[tuple[int, ...], ...], reach: Reach, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Shapes are (B, room, ...)."""
        self.length, self.room, self.reach = 0, shapes[0][1], reach
        self.num_places = most_kept(reach, self.room)
        self.buffers = [
            torch.zeros((shape[0], self.num_places, *shape[2:]), dtype=dtype, device=device) for shape in shapes
        ]

    def append(self, *new_BLX: Tensor) -> tuple[Tensor, ...]:
        """Take in L positions; return, in order, at least all that they see: past ones and themselves.

        A single position sees all of a full ring, whose order then does not matter: it gets the buffers as they are.
        `ValueError` when the room is used up.
        """
        start, num_new = self.length, new_BLX[0].shape[1]
        end = start + num_new
        if end > self.room:
            raise ValueError(f"the state has room for {self.room} positions and would hold {end}")
        self.length = end
        if num_new == 1 or end <= self.num_places:
            self._write(start, new_BLX)
            return tuple(buffer[:, : min(end, self.num_places)] for buffer in self.buffers)
        past = self._places(self._kept(start))
        seen = tuple(torch.cat((buffer[:, past], x), 1) for buffer, x in zip(self.buffers, new_BLX, strict=True))
        self._write(start, new_BLX)
        return seen

    def _kept(self, length: int) -> Tensor:
        """Which of the first `length` positions are kept, in order."""
        first = min(self.reach.first, length)
        since = max(first, length - (self.num_places - self.reach.first))
        positions = [*range(first), *range(since, length)]
        return torch.tensor(positions, dtype=torch.long, device=self.buffers[0].device)

    def _places(self, positions: Tensor) -> Tensor:
        first = self.reach.first
        return torch.where(positions < first, positions, first + (positions - first) % (self.num_places - first))

    def _write(self, start: int, new_BLX: tuple[Tensor, ...]) -> None:
        """Of the new positions those that are kept; no two have the same place."""
        if self.length <= self.num_places:
            for buffer, x_BLX in zip(self.buffers, new_BLX, strict=True):
                buffer[:, start : self.length] = x_BLX
            return
        kept = self._kept(self.length)
        kept = kept[kept >= start]
        for buffer, x_BLX in zip(self.buffers, new_BLX, strict=True):
            buffer[:, self._places(kept)] = x_BLX[:, kept - start].to(buffer.dtype)


class KVState(State):
    """Keys and values."""

    def __init__(
        self,
        keys: tuple[int, ...],
        values: tuple[int, ...],
        reach: Reach,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Shapes are (B, room, G, K)."""
        super().__init__((keys, values), reach, dtype=dtype, device=device)

    def extend(self, k_BLGK: Tensor, v_BLGK: Tensor) -> tuple[Tensor, Tensor]:
        """`append` for both."""
        k_BSGK, v_BSGK = self.append(k_BLGK, v_BLGK)
        return k_BSGK, v_BSGK


class NoState:
    """Of a mixer that keeps nothing itself: how many positions it has seen."""

    length = 0
