"""Whether ranks that hold copies of a tensor hold the same bits.

Each rank reduces what it holds to one 64-bit number for each set of axes that cuts it, and sees everybody's in one
collective. Only where they differ, which all ranks then see alike, a second one brings the number of every tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.config import RunError
from surefoot.dist.collectives import gather
from surefoot.dist.layout import COPIES, Layout
from surefoot.dist.mesh import AXES, Grid
from surefoot.dist.objects import all_objects
from surefoot.optim.base import Optimizer, Param
from surefoot.parallel.shard import DataParallel
from surefoot.train.agree import Ranks

_CHUNK = 1 << 20
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number
_MIX = -4658895280553007687  # 0xBF58476D1CE4E5B9
_NUM_SLOTS = 1 << len(AXES)
_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Held(NamedTuple):
    """A tensor of this rank and how the whole lies."""

    name: str
    tensor: Tensor
    layout: Layout


class Seen(NamedTuple):
    """A rank's number for one tensor; `slot` says which other ranks hold the same part."""

    slot: int
    number: int


@dataclass(frozen=True)
class Deviation:
    """A tensor whose copies differ: the number that each rank has for it, and who is not with the majority."""

    name: str
    numbers: Mapping[int, int]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those beside the majority; all, where there is none."""
        (number, most), *others = Counter(self.numbers.values()).most_common()
        is_tie = any(count == most for _, count in others)
        return tuple(rank for rank, found in self.numbers.items() if is_tie or found != number)

    def describe(self) -> str:
        """In words."""
        shown = ", ".join(str(rank) for rank in self.ranks[:8]) + (", …" if len(self.ranks) > 8 else "")
        who = f"rank {shown} deviates" if len(self.ranks) == 1 else f"ranks {shown} deviate"
        if len(self.ranks) == len(self.numbers):
            return f"{self.name}: ranks {shown} hold different bits"
        return f"{self.name}: {who} from the other {len(self.numbers) - len(self.ranks)} that hold it"


class CopyCheck:
    """Looks at one run's tensors now and then, and remembers the step at which their copies last agreed."""

    def __init__(
        self, data_parallel: DataParallel, params: Sequence[Param], optimizer: Optimizer, ranks: Ranks, folder: Path
    ) -> None:
        self._data_parallel, self._params, self._optimizer, self._ranks = data_parallel, params, optimizer, ranks
        self._folder = folder
        self.agreed_step = 0

    def check(self, step: int) -> None:
        """`RunError`, the same on all ranks and with evidence in the folder, where copies differ after `step`."""
        if self._ranks.group is None or step == self.agreed_step:
            return
        self._ranks.heartbeat.enter("check")
        found = deviations(held(self._data_parallel, self._params, self._optimizer), self._ranks)
        if not found:
            self.agreed_step = step
            return
        file = self._folder / "evidence" / f"step-{step:08d}" / "copies.json"
        if self._ranks.is_first:
            self._write(file, found, step)
        raise RunError(
            f"step {step}: {found[0].describe()} ({len(found)} tensors in all, see {file}); copies agreed at step "
            f"{self.agreed_step}; suspect the machine of a rank that deviates, and resume from the last checkpoint, whose "
            f"copies agreed"
        )

    def _write(self, file: Path, found: Sequence[Deviation], step: int) -> None:
        tensors = [
            {
                "name": one.name,
                "deviating_ranks": one.ranks,
                "numbers": {rank: f"{number & _MASK:016x}" for rank, number in one.numbers.items()},
            }
            for one in found
        ]
        evidence = {"step": step, "agreed_at_step": self.agreed_step, "tensors": tensors}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(evidence, indent=2) + "\n", encoding="utf-8")


def held(data_parallel: DataParallel, params: Sequence[Param], optimizer: Optimizer) -> list[Held]:
    """Weights and moments of this rank in the model's order, by name."""
    found, state = [], optimizer.state()
    for local, param in zip(data_parallel.locals, params, strict=True):
        layout = local.layout
        if local.weight is local.part or isinstance(local.weight, DTensor):
            found.append(Held(local.name, param.tensor.detach(), layout))
        else:
            # ZeRO-1: the whole weight computes, the part is a view of it, and the last split is the optimizer's alone.
            found.append(Held(local.name, local.weight.detach(), Layout(layout.shape, layout.splits[:-1])))
        for moment, tensor in state.get(param.name, {}).items():
            lies = layout if tensor.shape == param.tensor.shape else Layout(())
            found.append(Held(f"{local.name}/{moment}", tensor, lies))
    return found


def deviations(tensors: Sequence[Held], ranks: Ranks) -> list[Deviation]:
    """The tensors whose copies differ, in the model's order; all ranks call it and get the same answer."""
    grid = ranks.mesh.grid
    copied = [held for held in tensors if _has_copies(held.layout, grid)]
    numbers = torch.stack([_number(held.tensor) for held in copied]).tolist() if copied else []
    own = {held.name: Seen(_slot(held.layout), number) for held, number in zip(copied, numbers, strict=True)}
    summary = torch.tensor(_summary(own), dtype=torch.int64, device=ranks.device)
    found = gather(summary, 0, ranks.group).view(grid.num_ranks, _NUM_SLOTS, 2).tolist()
    everybody: list[dict[Any, Seen]] = [
        {(slot, names): Seen(slot, number) for slot, (names, number) in enumerate(slots) if names} for slots in found
    ]
    if not any(_compare(everybody, grid)):
        return []
    return list(_compare(all_objects(own, ranks.group), grid))


def _compare(everybody: Sequence[Mapping[Any, Seen]], grid: Grid) -> Iterator[Deviation]:
    """What ranks call by the same name, and hold the same part of, and have different numbers for."""
    holders: dict[Any, dict[tuple[Any, ...], dict[int, int]]] = {}
    for rank, seen in enumerate(everybody):
        coordinates = grid.coordinates(rank)
        for name, (slot, number) in seen.items():
            part = tuple(coordinates[axis] for bit, axis in enumerate(AXES) if slot >> bit & 1)
            holders.setdefault(name, {}).setdefault((slot, *part), {})[rank] = number
    for name, parts in holders.items():
        for numbers in parts.values():
            if len(set(numbers.values())) > 1:
                yield Deviation(str(name), numbers)


def _slot(layout: Layout) -> int:
    """The axes along which ranks hold different parts, a bit each. Pipeline ranks always do."""
    return sum(1 << bit for bit, axis in enumerate(AXES) if axis not in COPIES or layout.is_cut_along(axis))


def _has_copies(layout: Layout, grid: Grid) -> bool:
    slot = _slot(layout)
    return any(grid.size(axis) > 1 for bit, axis in enumerate(AXES) if not slot >> bit & 1)


def _summary(own: Mapping[str, Seen]) -> list[int]:
    """For each slot a number of the names in it (0: none) and one of their numbers, as signed 64-bit words."""
    slots = [[0, 0] for _ in range(_NUM_SLOTS)]
    for name, (slot, number) in own.items():
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") | 1
        names, numbers = slots[slot]
        slots[slot] = [(names * _ODD + digest) & _MASK, (numbers * _ODD + (number ^ digest)) & _MASK]
    return [word - (word >> 63 << 64) for slot in slots for word in slot]


def _number(tensor: Tensor) -> Tensor:
    """The bits of a tensor as one word: a sum of its entries, each times an odd number of its own.

    Modulo 2^64 no change of a single entry leaves it as it was, and a change of several does with odds of 2^-64 or so.
    """
    size = tensor.element_size()
    bits = tensor.contiguous().view(_INTEGERS[size]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(min(len(bits), _CHUNK), tensor.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        words = chunk.to(torch.int64)
        if size == 8:
            words = words ^ (words >> 32 & 0xFFFFFFFF)  # else the signs of any two entries would cancel
        total += (words * weights[: len(chunk)]).sum() * (2 * number + 1)
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    # Mixed as by splitmix64 (Steele et al., 2014): weights in a row would let a change here undo one there.
    mixed = torch.arange(1, count + 1, device=device) * _ODD
    mixed = (mixed ^ (mixed >> 30 & (1 << 34) - 1)) * _MIX
    return (mixed ^ (mixed >> 27 & (1 << 37) - 1)) | 1
