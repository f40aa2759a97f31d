"""Names of pipeline schedules and what each asks for."""

from __future__ import annotations

from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"]

SINGLE = frozenset({"gpipe", "1f1b"})
"""One stage a rank."""

V_SHAPED = frozenset({"zbv", "dualpipev"})
"""Two stages a rank, one counted from the front and one from the back."""

SPLIT_BACKWARD = frozenset({"zero-bubble", "zbv", "dualpipev"})
"""Gradients of weights are computed apart from those of activations, later."""


def takes(schedule: Schedule, num_ranks: int, num_stages: int, num_micro_batches: int) -> bool:
    """Whether the schedule works with so many micro-batches a step."""
    if schedule in {"gpipe", "zbv"}:
        return True
    if schedule in {"1f1b", "dualpipev"}:
        return num_micro_batches >= num_stages
    return num_micro_batches % max(1, num_micro_batches // num_ranks) == 0
