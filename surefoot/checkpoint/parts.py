"""Parts of logical tensors: what a rank writes, where it lies on disk, and what of it another part needs.

A rank may hold parts of only some tensors, and none of a few. All boxes of a tensor together tile it as a grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.checkpoint.archive import DTYPES
from surefoot.checkpoint.manifest import TensorRecord
from surefoot.config import CheckpointError
from surefoot.dist.layout import Box


@dataclass(frozen=True)
class Part:
    """The entries of a tensor of `shape` that lie in `box`."""

    shape: tuple[int, ...]
    box: Box
    tensor: Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.box.shape or len(self.shape) != len(self.box.shape):
            raise ValueError(f"{tuple(self.tensor.shape)} does not fill {self.box} of {self.shape}")

    @property
    def record(self) -> TensorRecord:
        """Shape and dtype of the logical tensor."""
        return TensorRecord(self.shape, str(self.tensor.dtype).removeprefix("torch."))


@dataclass(frozen=True)
class PartRecord:
    """Where a part lies: so many bytes of a file."""

    name: str
    tensor: TensorRecord
    box: Box
    file: str
    offset: int
    length: int


def whole(tensor: Tensor) -> Part:
    """All of a tensor that one rank holds."""
    shape = tuple(tensor.shape)
    return Part(shape, Box.whole(shape), tensor)


def common(box: Box, other: Box) -> Box | None:
    """What two parts of one tensor share; None where that is nothing."""
    offset = tuple(map(max, box.offset, other.offset))
    ends = [min(a + m, b + n) for a, m, b, n in zip(box.offset, box.shape, other.offset, other.shape, strict=True)]
    if any(end <= start for start, end in zip(offset, ends, strict=True)):
        return None
    return Box(offset, tuple(end - start for start, end in zip(offset, ends, strict=True)))


def within(part: Box, box: Box) -> Box:
    """Where `part` lies inside `box`."""
    return Box(tuple(a - b for a, b in zip(part.offset, box.offset, strict=True)), part.shape)


def check_part(place: object, name: str, part: Part) -> None:
    """`CheckpointError` for what no checkpoint can give back."""
    tensor, dtype = part.tensor, part.record.dtype
    if tensor.layout != torch.strided or tensor.is_meta or dtype not in DTYPES:
        raise CheckpointError(
            f"{place}: {name} ({dtype}) is not a dense tensor of numbers with memory; only such can be saved"
        )
