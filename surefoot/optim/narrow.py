"""Weights and moments held in bf16, while the arithmetic on them is in at least fp32.

An update widens them, computes, and rounds what comes out:

    nearest     an update below 2^-9 of its weight is lost
    stochastic  up or down, with odds that keep the mean (Gupta et al., 2015)
    kahan       what rounding took from a weight is kept beside it, in bf16 too, and belongs to the weight at the next update
                (Kahan, 1965; Zamirai et al., 2020)

Moments are always rounded stochastically: an average of long memory moves by less than a bf16 step. What decides an entry's
rounding is a hash of the weight's name, the number of its update and the entry's place in the logical weight: the same in
every layout, and to go on a run needs no more than that number.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from surefoot.optim.base import Param

_PIECE = 1 << 18
"""Entries at a time: what is wide meanwhile stays in cache."""


def widened(x: Tensor) -> Tensor:
    """In at least fp32: itself where it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def is_narrow(x: Tensor) -> bool:
    """Whether it holds less than fp32."""
    return x.dtype.itemsize < 4


class Keeper:
    """Reads and writes what one weight's optimizer holds; `state` is what it must remember itself."""

    def __init__(self, param: Param) -> None:
        self._param, self._storage = param, param.storage
        weight = param.tensor.detach()
        self._moments = self._storage.moments or torch.promote_types(weight.dtype, torch.float32)
        self.state: dict[str, Tensor] = {}
        if is_narrow(weight) and self._storage.rounding == "kahan":
            self.state["compensation"] = torch.zeros_like(weight)
        if self._moments.itemsize < 4 or (is_narrow(weight) and self._storage.rounding == "stochastic"):
            self.state["updates"] = torch.zeros((), dtype=torch.int64, device="cpu")

    @property
    def is_plain(self) -> bool:
        """Whether weight, gradient (there must be one) and moments can be computed with as they are."""
        weight = self._param.tensor
        assert weight.grad is not None
        return not is_narrow(weight) and weight.dtype == self._moments == weight.grad.dtype

    def new_moment(self) -> Tensor:
        """Zeros like the weight."""
        return torch.zeros_like(self._param.tensor.detach(), dtype=self._moments)

    def begin(self) -> None:
        """Before an update."""
        if "updates" in self.state:
            self.state["updates"] += 1

    def pieces(self) -> Iterator[slice]:
        """Runs of rows, each to be read, computed with and written before the next."""
        rows, *rest = self._param.tensor.shape
        run = max(1, _PIECE // max(1, math.prod(rest)))
        for start in range(0, rows, run):
            yield slice(start, min(start + run, rows))

    def gradient(self, rows: slice) -> Tensor:
        """Of some rows, wide."""
        assert self._param.tensor.grad is not None
        return widened(self._param.tensor.grad[rows])

    def read(self, rows: slice) -> Tensor:
        """The weight's rows, wide: to be changed and written."""
        wide = widened(self._param.tensor.detach()[rows])
        if "compensation" in self.state:
            wide += self.state["compensation"][rows]
        return wide

    def write(self, rows: slice, wide: Tensor) -> None:
        """The weight's rows, rounded."""
        target = self._param.tensor.detach()[rows]
        if not is_narrow(target):
            if target.data_ptr() != wide.data_ptr():
                target.copy_(wide)
            return
        if self._storage.rounding == "stochastic":
            self._round(target, rows, wide, "weight")
            return
        target.copy_(wide)
        if "compensation" in self.state:
            self.state["compensation"][rows].copy_(wide.sub_(target))

    def write_moment(self, moment: Tensor, rows: slice, wide: Tensor, name: str) -> None:
        """Rows of a moment by its name, rounded."""
        target = moment[rows]
        if is_narrow(moment):
            self._round(target, rows, wide, name)
        elif target.data_ptr() != wide.data_ptr():
            target.copy_(wide)

    def _round(self, target: Tensor, rows: slice, wide: Tensor, what: str) -> None:
        key = f"{self._param.name}/{what}/{int(self.state['updates'])}"
        target.copy_(stochastically(wide.float(), random_bits(key, self._places(rows, target.device))))

    def _places(self, rows: slice, device: torch.device) -> Tensor:
        """Of each entry of some rows, its place in the logical weight, row by row of that."""
        box, shape = self._param.box, self._param.shape
        places = torch.zeros((), dtype=torch.int64, device=device)
        for dim, (offset, size) in enumerate(zip(box.offset, box.shape, strict=True)):
            first, last = (offset + rows.start, offset + rows.stop) if dim == 0 else (offset, offset + size)
            stride = math.prod(shape[dim + 1 :])
            places = places[..., None] + torch.arange(first, last, device=device) * stride
        return places


def stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 numbers to one of their two neighbours in bf16, still as fp32: up in magnitude where `bits` (int32, of which the low
    16 are uniform) and what is to be cut off carry over."""
    return ((x.contiguous().view(torch.int32) + (bits & 0xFFFF)) & -0x10000).view(torch.float32)


def random_bits(key: str, places: Tensor) -> Tensor:
    """32 bits for each place (int64), as int32: a hash of the key and the place alone."""
    digest = hashlib.sha256(key.encode()).digest()
    first, second = (int.from_bytes(digest[start : start + 4], "little", signed=True) for start in (0, 4))
    mixed = _mix(_low(places) ^ first)
    if places.numel() and not places.is_meta and int(places[(-1,) * places.dim()]) >> 32:
        mixed ^= _mix(_low(places >> 32))
    return _mix(mixed ^ second)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits of 64."""
    return x.to(torch.int32)


def _mix(x: Tensor) -> Tensor:
    """A permutation of 32-bit words in which every bit of the input flips every bit of the output with odds of about a half
    (Wellons, 2018: lowbias32); in place. Right shifts are of unsigned words."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x
