"""Where each rank's part of a logical tensor lies: always a box, whatever combination of axes cut it.

A split cuts what is left of one dimension into equal runs, the last ones shorter or empty where it does not divide
(`torch.chunk`'s rule, which FSDP2 follows too).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from surefoot.dist.mesh import AXES, Grid, Mesh

COPIES = tuple(axis for axis in AXES if axis != "pipeline")
"""Axes along which ranks may hold copies of one tensor."""


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it starts and how far it reaches, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What cuts the box out of the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Split:
    """One dimension cut along mesh axes taken together."""

    dim: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """A logical tensor over a grid: cut along the axes of `splits`, in this order, and a copy along every other axis.

    Ranks along the pipeline hold different tensors, not copies: none knows a layout of what it does not hold.
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    def box(self, grid: Grid, coordinates: Mapping[str, int]) -> Box:
        """The part of the rank at `coordinates`."""
        offset, shape = [0] * len(self.shape), list(self.shape)
        for split in self.splits:
            run = -(-shape[split.dim] // grid.size(*split.axes))
            start = min(grid.index(coordinates, split.axes) * run, shape[split.dim])
            offset[split.dim] += start
            shape[split.dim] = min(run, shape[split.dim] - start)
        return Box(tuple(offset), tuple(shape))

    def split(self, dim: int, *axes: str) -> Layout:
        """The layout cut once more."""
        return Layout(self.shape, (*self.splits, Split(dim, axes)))

    def is_cut_along(self, axis: str) -> bool:
        """Whether ranks along `axis` hold different parts."""
        return any(axis in split.axes for split in self.splits)

    def counts_at(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the copy there is the one that counts: each entry of the logical tensor counts on exactly one rank."""
        return all(coordinates[axis] == 0 for axis in COPIES if not self.is_cut_along(axis))


@dataclass(frozen=True)
class Place:
    """Where a rank's part of one logical tensor lies."""

    layout: Layout
    mesh: Mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self.layout.shape

    @cached_property
    def box(self) -> Box:
        """This rank's part."""
        return self.layout.box(self.mesh.grid, self.mesh.coordinates)

    @cached_property
    def counts(self) -> bool:
        """Whether this rank's copy is the one that counts in a sum over all ranks."""
        return self.layout.counts_at(self.mesh.coordinates)
