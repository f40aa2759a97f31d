"""Where each rank's part of a logical tensor lies: always a box, whatever combination of axes cut it.

A split cuts what is left of one dimension into equal runs, the last ones shorter or empty where it does not divide
(`torch.chunk`'s rule, which FSDP2 follows too).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from surefoot.dist.mesh import AXES, Grid, Mesh


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it starts and how far it reaches, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

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

    `stages` are the pipeline ranks that hold it (all of them where None).
    """

    shape: tuple[int, ...]
    splits: tuple[Split, ...] = ()
    stages: tuple[int, ...] | None = None

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
        return Layout(self.shape, (*self.splits, Split(dim, axes)), self.stages)

    def is_cut_along(self, axis: str) -> bool:
        """Whether ranks along `axis` hold different parts."""
        return any(axis in split.axes for split in self.splits)

    def is_here(self, coordinates: Mapping[str, int]) -> bool:
        """Whether the rank at `coordinates` holds a part at all."""
        return self.stages is None or coordinates["pipeline"] in self.stages

    def counts_here(self, coordinates: Mapping[str, int]) -> bool:
        """Whether this is the one copy that counts: each entry of the logical tensor counts on exactly one rank."""
        first_stage = 0 if self.stages is None else self.stages[0]
        return coordinates["pipeline"] == first_stage and all(
            coordinates[axis] == 0 for axis in AXES[1:] if not self.is_cut_along(axis)
        )

    def holders(self, grid: Grid, coordinates: Mapping[str, int]) -> Iterator[tuple[int, Box]]:
        """The ranks that together hold one copy, nearest to `coordinates`: each differs from it only along cut axes."""
        axes = [axis for axis in AXES if self.is_cut_along(axis)]
        for indexes in itertools.product(*(range(grid.size(axis)) for axis in axes)):
            place = dict(coordinates) | dict(zip(axes, indexes, strict=True))
            yield grid.rank(place), self.box(grid, place)


@dataclass(frozen=True)
class Place:
    """Where a rank's part of one logical tensor lies."""

    layout: Layout
    mesh: Mesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the logical tensor."""
        return self.layout.shape

    @property
    def box(self) -> Box:
        """This rank's part."""
        return self.layout.box(self.mesh.grid, self.mesh.coordinates)

    @property
    def counts(self) -> bool:
        """Whether this rank's copy is the one that counts in a sum over all ranks."""
        return self.layout.counts_here(self.mesh.coordinates)
