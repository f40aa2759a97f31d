"""What ranks must agree on: how many tokens a step has, whether to stop, what the step's sums are.

Each quantity is contributed by exactly the ranks that hold it: a sample by one rank of those that see it, a sum of losses
by every rank that computed a part of it. One process contributes everything and communicates nothing.

Legend: B samples of a step over all ranks, W 64-bit words of a sample's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.data.dataset import Batch
from surefoot.dist.collectives import max_, sum_
from surefoot.dist.heartbeat import Heartbeat
from surefoot.dist.mesh import AXES, DATA, Mesh
from surefoot.dist.objects import all_objects
from surefoot.optim.base import Param
from surefoot.precision.meter import Meter


class StepFacts(NamedTuple):
    """Of the whole step, equal on all ranks: valid tokens, bytes of text, whether any rank was told to stop or still writes
    a checkpoint, a hash of all token ids in the order of samples, and the seconds that each rank said it worked."""

    num_tokens: int
    num_bytes: float
    is_stopping: bool
    is_writing: bool
    digest: str
    rank_seconds: tuple[float, ...] = ()


class Ranks:
    """All ranks of a run, seen from one of them."""

    def __init__(self, mesh: Mesh, device: torch.device, heartbeat: Heartbeat | None = None) -> None:
        self.mesh, self.device = mesh, device
        self.heartbeat = heartbeat or Heartbeat()
        self.group = mesh.group(*AXES)
        self.is_first = mesh.rank == 0
        self._brings_samples = all(mesh.coordinates[axis] == 0 for axis in AXES if axis not in DATA)
        # Tensor-parallel ranks all compute the whole loss of their tokens.
        self._brings_losses = mesh.coordinates["tensor"] == 0

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Rank 0 goes through the body first, then all others: what it has put into a cache need not be made again."""
        if not self.is_first:
            sum_(torch.zeros(1, device=self.device), self.group)
        yield
        if self.is_first:
            sum_(torch.zeros(1, device=self.device), self.group)

    def own(self, batch: int) -> slice:
        """This rank's samples among a step's."""
        size = batch // self.mesh.size(*DATA)
        first = self.mesh.index(*DATA) * size
        return slice(first, first + size)

    def facts(self, batch: Batch, *, is_stopping: bool, is_writing: bool, seconds: float = 0.0) -> StepFacts:
        """What this rank's part of a batch adds up to over all ranks; `seconds` is how long it has worked."""
        count = len(batch.tokens_BL)
        words_BW = torch.zeros((count * self.mesh.size(*DATA), 4), dtype=torch.int64)
        totals = torch.zeros(4 + self.mesh.grid.num_ranks, dtype=torch.float64)
        if self._brings_samples:
            rows = [np.frombuffer(hashlib.sha256(ids.tobytes()).digest(), np.int64) for ids in batch.tokens_BL]
            words_BW[self.own(len(words_BW))] = torch.from_numpy(np.stack(rows))
            totals[0], totals[1] = batch.num_tokens, batch.num_bytes
        totals[2], totals[3], totals[4 + self.mesh.rank] = float(is_stopping), float(is_writing), seconds
        words_BW, totals = (sum_(tensor.to(self.device), self.group).cpu() for tensor in (words_BW, totals))
        digest = hashlib.sha256(words_BW.numpy().tobytes()).hexdigest()
        num_tokens, num_bytes, stopping, writing, *rank_seconds = totals.tolist()
        return StepFacts(int(num_tokens), num_bytes, bool(stopping), bool(writing), digest, tuple(rank_seconds))

    def sums(self, *values: float) -> list[float]:
        """Sums of losses over all tokens of all ranks."""
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        found: list[float] = sum_(own if self._brings_losses else torch.zeros_like(own), self.group).tolist()
        return found

    def end_step(self, meter: Meter) -> dict[str, dict[str, float]]:
        """What was seen of narrow products in a step, over all ranks (`Meter.end_step`)."""
        return meter.end_step(lambda x: sum_(x, self.group), lambda x: max_(x, self.group))

    def norms(self, params: Sequence[Param]) -> dict[str, float | None]:
        """The gradient norm of each logical weight; None where there is no gradient."""
        own = [param.name for param in params]
        names = list(dict.fromkeys(name for stage in all_objects(own, self.mesh.group("pipeline")) for name in stage))
        rows = {name: row for row, name in enumerate(names)}
        squares = torch.zeros((len(names), 2), dtype=torch.float64, device=self.device)
        for param in params:
            if param.tensor.grad is not None and param.counts:
                row = squares[rows[param.name]]
                row[0], row[1] = param.tensor.grad.double().square().sum(), 1.0
        found = sum_(squares, self.group).tolist()
        return {name: square**0.5 if seen else None for name, (square, seen) in zip(names, found, strict=True)}

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether any rank has it set."""
        found = torch.tensor(flags, dtype=torch.int32, device=self.device)
        return [bool(flag) for flag in max_(found, self.group).tolist()]

    def weights(self, params: Sequence[Param]) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the model, whole and bit for bit, by name; all ranks go through them together, one at a time.

        Ranks of different pipeline stages may hold different ones.
        """
        own = {param.name: param for param in params}
        described = {name: (param.shape, param.tensor.dtype) for name, param in own.items()}
        for stage in all_objects(described, self.mesh.group("pipeline")):
            described |= stage
        for name in sorted(described):
            shape, dtype = described[name]
            param = own.get(name)
            if self.group is None or (param is not None and param.place is None):
                yield name, own[name].tensor.detach()
                continue
            full = torch.zeros(shape, dtype=dtype, device=self.device)
            if param is not None and param.place is not None and param.place.counts:
                full[param.place.box.slices] = param.tensor.detach()
            sum_(full.view(-1).view(torch.uint8), self.group)  # bytes plus zeros: no sign of a zero is lost
            yield name, full
