"""Runs: stretches of a sequence that are here, and how what is carried along the sequence finds its way between them.

One process holds a sequence as one run. Where it is cut, `Runs` is swapped for a form that knows the runs of all processes.

Legend: B batch, R runs here, A runs of the whole sequence in order, L length here, C channels, K taps, X whatever follows; n
blocks of c positions, i a position and j an earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def of_all_runs(xs_BLX: Sequence[Tensor], runs: Runs) -> list[Tensor]:
    """What lies here of some things, which differ in their last dimension at most, to what there is of them in the whole
    sequence, in order."""
    if runs.num_runs == 1:
        return list(xs_BLX)
    all_BAX = runs.spread(torch.cat(list(xs_BLX), -1).unflatten(1, (runs.num_runs, -1))).flatten(1, 2)
    return list(all_BAX.split([x_BLX.shape[-1] for x_BLX in xs_BLX], -1))


def in_blocks(x_BLX: Tensor, runs: Runs, block: int) -> Tensor:
    """(B, L, X) to (B, n, c, X), each run filled up with zeros to a whole number of blocks."""
    by_run: Tensor = x_BLX.unflatten(1, (runs.num_runs, -1))
    if padding := -by_run.shape[2] % block:
        by_run = torch.cat((by_run, by_run.new_zeros((*by_run.shape[:2], padding, *by_run.shape[3:]))), 2)
    return by_run.reshape(len(x_BLX), -1, block, *x_BLX.shape[2:])


def from_blocks(y_BncX: Tensor, runs: Runs, length: int) -> Tensor:
    """The other way: (B, L, X) of `length` positions, without what was filled up."""
    by_run: Tensor = y_BncX.flatten(1, 2).unflatten(1, (runs.num_runs, -1))
    return by_run[:, :, : length // runs.num_runs].flatten(1, 2)


def starts_in_blocks(starts: Tensor, batch: int, length: int, runs: Runs, block: int) -> tuple[Tensor, Tensor]:
    """How many documents have started in a block up to each position (B, n, c), where `starts` (L) or (B, L) says where they do;
    and which positions j each i sees (B, n, c, c): earlier ones and itself, if no document has started between them."""
    counts_Bnc = in_blocks(starts.expand(batch, length).to(torch.int32), runs, block).cumsum(-1)
    is_seen_Bnij = counts_Bnc[..., :, None] == counts_Bnc[..., None, :]
    return counts_Bnc, is_seen_Bnij & torch.ones((block, block), dtype=torch.bool, device=starts.device).tril()
