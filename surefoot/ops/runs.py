"""Runs: stretches of a sequence that are here, and how what is carried along the sequence finds its way between them.

One process holds a sequence as one run. Where it is cut, `Runs` is swapped for a form that knows the runs of all processes.

Legend: B batch, R runs here, A runs of the whole sequence in order, L length here, C channels, K taps.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Runs(Protocol):
    """What a recurrent mixer holds to carry things from each run to the next."""

    num_runs: int

    def spread(self, x_BR: Tensor) -> Tensor:
        """One thing for each run here (B, R, …) to one for each run of the sequence, in order (B, A, …)."""

    def pick(self, x_BA: Tensor) -> Tensor:
        """The other way: those of the runs that are here."""


class OneRun:
    """All of the sequence is here."""

    num_runs = 1

    def spread(self, x_BR: Tensor) -> Tensor:
        """See `Runs.spread`."""
        return x_BR

    def pick(self, x_BA: Tensor) -> Tensor:
        """See `Runs.pick`."""
        return x_BA


def before_runs(x_BLC: Tensor, count: int, runs: Runs, first_BKC: Tensor | None) -> Tensor:
    """The `count` positions before each run (B, R, K, C): of the run before it, and `first_BKC` (or zeros) before the first."""
    last_BRKC = torch.stack([run[:, run.shape[1] - count :] for run in x_BLC.chunk(runs.num_runs, 1)], 1)
    all_BAKC = runs.spread(last_BRKC)
    start_B1KC = torch.zeros_like(all_BAKC[:, :1]) if first_BKC is None else first_BKC[:, None]
    return runs.pick(torch.cat((start_B1KC, all_BAKC[:, :-1]), 1))
