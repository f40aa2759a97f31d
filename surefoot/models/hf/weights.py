"""How weights on a hub's disk and a decoder's own belong together: each pair a function and its inverse.

Legend: E experts, C channels, K taps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Convert = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Tie:
    """The tensors `theirs` hold what `ours` do. `to_theirs` works on shapes alone (meta) too, which says what to expect."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: Convert
    to_theirs: Convert

    def within(self, theirs: str, ours: str) -> Tie:
        """The same where both sides are parts of something larger, with those prefixes."""
        return replace(
            self, theirs=tuple(theirs + name for name in self.theirs), ours=tuple(ours + name for name in self.ours)
        )


def same(theirs: str, ours: str) -> Tie:
    """One tensor under two names."""
    return Tie((theirs,), (ours,), list, list)


def stacked(theirs: Iterable[str], ours: str) -> Tie:
    """One tensor an expert, for one tensor (E, …)."""
    return Tie(tuple(theirs), (ours,), lambda each: [torch.stack(list(each))], lambda whole: list(whole[0].unbind(0)))


def joined(theirs: str, ours: Sequence[str], sizes: Sequence[int], dim: int = 0) -> Tie:
    """One tensor that is several one after another along a dimension."""
    return Tie(
        (theirs,),
        tuple(ours),
        lambda whole: [part.contiguous() for part in whole[0].split(list(sizes), dim)],
        lambda parts: [torch.cat(list(parts), dim)],
    )


def convolution(theirs: str, ours: Sequence[str], sizes: Sequence[int]) -> Tie:
    """Taps of a depthwise convolution, (C, 1, K) on disk, over channels that are several one after another."""
    return Tie(
        (theirs,),
        tuple(ours),
        lambda whole: [part.contiguous() for part in whole[0].squeeze(1).split(list(sizes))],
        lambda parts: [torch.cat(list(parts)).unsqueeze(1)],
    )


def grouped(theirs: str, ours: Sequence[str], num_groups: int, sizes: Sequence[int]) -> Tie:
    """One tensor whose rows are groups, each with so many rows of every one of several tensors."""

    def to_ours(whole: Sequence[Tensor]) -> list[Tensor]:
        return [part.flatten(0, 1) for part in whole[0].unflatten(0, (num_groups, -1)).split(list(sizes), 1)]

    def to_theirs(parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.cat([part.unflatten(0, (num_groups, -1)) for part in parts], 1).flatten(0, 1)]

    return Tie((theirs,), tuple(ours), to_ours, to_theirs)
