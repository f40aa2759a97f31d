"""Which collectives a rank issues, over which ranks, and how many bytes of payload it sends.

What a collective sends is the least any algorithm can: of a whole of w bytes over n ranks, (n - 1)/n w for an all-gather or a
reduce-scatter, twice that for an all-reduce, everything but a rank's own share for an all-to-all, the message for a send.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from surefoot.dist.mesh import AXES, Grid

Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]

_OUTPUT_FIRST = frozenset({"_allgather_base_", "_reduce_scatter_base_", "alltoall_base_"})
"""Operations whose arguments are output, input, group; others have input, group."""


class Flow(NamedTuple):
    """A kind of collective along mesh axes of more than one rank."""

    axes: tuple[str, ...]
    kind: Kind

    def __str__(self) -> str:
        return f"{' x '.join(self.axes)}: {self.kind}"


@dataclass
class Amount:
    """Calls, and bytes that this rank sent in them."""

    calls: int = 0
    sent: float = 0.0


@dataclass
class Counter:
    """What was issued so far. Each call counts as `weight` of them."""

    weight: int = 1
    _by_ranks: dict[tuple[tuple[int, ...], Kind], Amount] = field(default_factory=dict)
    _members: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def note(self, func: Any, args: Any) -> None:
        """Count one c10d operation. `LookupError` for one that is not known here: nothing is missed in silence."""
        name = func._schema.name.removeprefix("c10d::")
        if name in {"recv_", "barrier"} or (name == "send" and args[0][0].numel() == 1):
            # torch's pipelines greet their neighbours with one number, once a run: no step's communication.
            return
        group = ProcessGroup.unbox(args[2] if name in _OUTPUT_FIRST else args[1])
        if group.group_name not in self._members:
            self._members[group.group_name] = tuple(dist.get_process_group_ranks(group))
        ranks = self._members[group.group_name]
        found = _payload(name, args, len(ranks), group.rank())
        if found is None:
            raise LookupError(f"dist.count knows no collective {func}")
        amount = self._by_ranks.setdefault((ranks, found[0]), Amount())
        amount.calls += self.weight
        amount.sent += self.weight * found[1]

    def restart(self) -> None:
        """Forget what was issued."""
        self._by_ranks.clear()

    def flows(self, grid: Grid) -> dict[Flow, Amount]:
        """By axes of a grid, in the order of first use."""
        found: dict[Flow, Amount] = {}
        for (ranks, kind), amount in self._by_ranks.items():
            there = found.setdefault(Flow(_axes_of(ranks, grid), kind), Amount())
            there.calls += amount.calls
            there.sent += amount.sent
        return found


class Counting(TorchDispatchMode):
    """While it is active, every collective of this rank is noted: ours, FSDP2's, in forward and in backward passes."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            self._counter.note(func, args)
        return func(*args, **(kwargs or {}))


def share_sent(kind: Kind, num_ranks: int) -> float:
    """The share of the whole that a rank sends."""
    if kind == "send":
        return 1.0
    return (2 if kind == "all-reduce" else 1) * (num_ranks - 1) / num_ranks


def _payload(name: str, args: Any, num_ranks: int, rank: int) -> tuple[Kind, float] | None:
    if name == "allreduce_":
        return "all-reduce", share_sent("all-reduce", num_ranks) * _bytes(args[0])
    if name == "_allgather_base_":
        return "all-gather", share_sent("all-gather", num_ranks) * _bytes(args[:1])
    if name == "_reduce_scatter_base_":
        return "reduce-scatter", share_sent("reduce-scatter", num_ranks) * _bytes(args[1:2])
    if name == "send":
        return "send", float(_bytes(args[0]))
    if name == "alltoall_base_":
        held, splits = args[1], args[4]
        if not splits:
            return "all-to-all", share_sent("all-to-all", num_ranks) * _bytes([held])
        return "all-to-all", _bytes([held]) * (1 - splits[rank] / max(1, sum(splits)))
    return None


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _axes_of(ranks: tuple[int, ...], grid: Grid) -> tuple[str, ...]:
    first = grid.coordinates(ranks[0])
    places = [grid.coordinates(rank) for rank in ranks[1:]]
    return tuple(axis for axis in AXES if any(place[axis] != first[axis] for place in places))
