"""Weighted mixing: which source, and which of its samples, is global sample g.

Sources are peeled off one after the other. Of the samples that reach it, a source with share p takes the k-th where
floor(p·i) steps from k to k + 1: after any number of samples its count is within one of p times that number, however
odd the shares. A keyed permutation inside blocks of fixed length then breaks up the regular pattern. All of it is exact
integer arithmetic on the index alone, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from surefoot.data.order import Permutation

BLOCK = 1024


class Mixing:
    """`shares` are the wanted numbers of samples, up to a common factor."""

    def __init__(self, shares: Sequence[float | Fraction], *, seed: int) -> None:
        exact = [Fraction(share) for share in shares]
        if not exact or min(exact) <= 0:
            raise ValueError(f"shares are {list(shares)}; each must be positive")
        self.num_sources = len(exact)
        # The share of each source among itself and the sources after it.
        self._shares = [share / sum(exact[index:]) for index, share in enumerate(exact)]
        self._seed = seed
        self._block: tuple[int, list[int], list[int]] | None = None

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, index among that source's samples) of a global sample."""
        block, offset = divmod(sample, BLOCK)
        rank = block * BLOCK + self._permutation(block)[0][offset]
        for source, share in enumerate(self._shares):
            taken = rank * share.numerator // share.denominator
            if (rank + 1) * share.numerator // share.denominator > taken:
                return source, taken
            rank -= taken
        raise AssertionError("the last source takes all that is left")

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples are each source's."""
        whole = num_samples // BLOCK * BLOCK  # whole blocks hold their ranks in another order: they count alike
        counts, left = [], whole
        for share in self._shares:
            counts.append(left * share.numerator // share.denominator)
            left -= counts[-1]
        for sample in range(whole, num_samples):
            counts[self.locate(sample)[0]] += 1
        return counts

    def sample_of(self, source: int, index: int) -> int:
        """The global sample that is number `index` of a source; the inverse of `locate`."""
        share = self._shares[source]
        rank = -(-(index + 1) * share.denominator // share.numerator) - 1
        for before in reversed(self._shares[:source]):
            # Of the first i that reached it, `before` left ceil(rest · i): number r of those was floor(r / rest).
            rest = 1 - before
            rank = rank * rest.denominator // rest.numerator
        block, offset = divmod(rank, BLOCK)
        return block * BLOCK + self._permutation(block)[1][offset]

    def first_possible(self, source: int, index: int) -> int:
        """No sample numbered `index` or more of a source lies before this global sample."""
        return self.sample_of(source, index) // BLOCK * BLOCK

    def _permutation(self, block: int) -> tuple[list[int], list[int]]:
        """Forward and inverse table of one block; the last one used is kept."""
        cached = self._block
        if cached is None or cached[0] != block:
            permutation = Permutation(BLOCK, seed=self._seed, stream="mixing", epoch=block)
            offsets = np.arange(BLOCK)
            cached = block, permutation.forward(offsets).tolist(), permutation.inverse(offsets).tolist()
            self._block = cached
        return cached[1], cached[2]
