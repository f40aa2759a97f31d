"""The matrix of layouts: values of each axis, every combination of them, and few combinations that hold each pair of values.

One table for `surefoot verify --all` and for the tests: a value that is added here is tried by both.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_args

from surefoot.config import ConfigError
from surefoot.parallel.context import Kind
from surefoot.parallel.plan import Plan
from surefoot.parallel.schedules import Schedule

MATRIX: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "pipeline": (
        {},
        *({"pipeline": size, "schedule": schedule} for size in (2, 4) for schedule in get_args(Schedule)),
    ),
    "data": (
        {},
        {"replicate": 2},
        {"shard": 2, "zero": 1},
        {"shard": 2, "zero": 2},
        {"shard": 2, "zero": 3},
        {"shard": 4, "zero": 1},
        {"shard": 4, "zero": 3},
        {"shard": 8, "zero": 3, "reshard": 2},
        {"replicate": 2, "shard": 2, "zero": 1},
        {"replicate": 2, "shard": 2, "zero": 3},
        {"shard": 8, "zero": 3},
        {"replicate": 2, "shard": 4, "zero": 3},
    ),
    "expert": ({}, *({"expert": size} for size in (2, 4, 8))),
    "tensor": ({}, *({"tensor": size} for size in (2, 4))),
    "context": ({}, *({"context": size, "context_kind": kind} for size in (2, 4) for kind in get_args(Kind))),
}
"""By axis its values, each as fields of a plan."""

Value = tuple[str, int]
"""An axis and the place of one of its values in the matrix."""


def combinations(num_ranks: int) -> list[Plan]:
    """Every combination on 2 to `num_ranks` ranks that is a plan; which model allows it is not asked here."""
    return [plan for plan in _places() if 1 < plan.num_ranks <= num_ranks]


def values_of(plan: Plan, size: int) -> frozenset[tuple[Value, ...]]:
    """The sets of `size` values that occur together in one of the `combinations`."""
    return frozenset(itertools.combinations(zip(MATRIX, _places()[plan], strict=True), size))


def covering(plans: Sequence[Plan], size: int = 2) -> list[Plan]:
    """Few of `plans` that have every set of `size` values that any of them has: always the one with the most new sets, the
    first of equals (greedy pairwise covering; Cohen et al., 1997)."""
    sets = {plan: values_of(plan, size) for plan in plans}
    missing = set[tuple[Value, ...]]().union(*sets.values())
    chosen = []
    while missing:
        best = max(plans, key=lambda plan: len(sets[plan] & missing))
        chosen.append(best)
        missing -= sets[best]
    return chosen


@cache
def _places() -> dict[Plan, tuple[int, ...]]:
    found = {}
    for places in itertools.product(*(range(len(values)) for values in MATRIX.values())):
        chosen = [values[place] for values, place in zip(MATRIX.values(), places, strict=True)]
        try:
            found[Plan(**{name: value for fields in chosen for name, value in fields.items()})] = places
        except ConfigError:
            continue
    return found
