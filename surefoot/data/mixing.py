"""Weighted mixing: which source, and which of its samples, is global sample g.

Sources are peeled off one after the other. Of the places that reach it, a source with share p takes the k-th where
floor(p·i) steps from k to k + 1: after any number of places its count is within one of p times that number, however odd
the shares. A keyed permutation of the places inside blocks of fixed length then breaks up the regular pattern. Each
source is read in sequence, so that its epochs follow each other. All of it is exact integer arithmetic on the index
alone, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from surefoot.data.order import Permutation

BLOCK = 1024


@dataclass(frozen=True)
class _Block:
    """`source` of each place, its `index` among that source's samples, and the `places` of each source in order."""

    number: int
    source: list[int]
    index: list[int]
    places: list[list[int]]


class Mixing:
    """`shares` are the wanted numbers of samples, up to a common factor."""

    def __init__(self, shares: Sequence[float | Fraction], *, seed: int) -> None:
        exact = [Fraction(share) for share in shares]
        if not exact or min(exact) <= 0:
            raise ValueError(f"shares are {list(shares)}; each must be positive")
        # The share of each source among itself and the sources after it.
        self._shares = [share / sum(exact[index:]) for index, share in enumerate(exact)]
        self._seed = seed
        self._last_block: _Block | None = None

    def locate(self, sample: int) -> tuple[int, int]:
        """(source, index among that source's samples) of a global sample."""
        number, place = divmod(sample, BLOCK)
        block = self._block(number)
        return block.source[place], block.index[place]

    def sample_of(self, source: int, index: int) -> int:
        """The global sample that is number `index` of a source; the inverse of `locate`, and increasing in `index`."""
        share = self._shares[source]
        rank = -(-(index + 1) * share.denominator // share.numerator) - 1
        for before in reversed(self._shares[:source]):
            # Of the first i that reached it, `before` left ceil(rest · i): number r of those was floor(r / rest).
            rest = 1 - before
            rank = rank * rest.denominator // rest.numerator
        number = rank // BLOCK
        return number * BLOCK + self._block(number).places[source][index - self._before(number)[source]]

    def counts(self, num_samples: int) -> list[int]:
        """How many of the first `num_samples` samples are each source's."""
        number, rest = divmod(num_samples, BLOCK)
        counts = self._before(number)
        for source in self._block(number).source[:rest]:
            counts[source] += 1
        return counts

    def _before(self, number: int) -> list[int]:
        """How many samples of each source lie before a block."""
        counts, left = [], number * BLOCK
        for share in self._shares:
            counts.append(left * share.numerator // share.denominator)
            left -= counts[-1]
        return counts

    def _source_at(self, rank: int) -> int:
        """The source that takes a place before places are permuted."""
        for source, share in enumerate(self._shares):
            taken = rank * share.numerator // share.denominator
            if (rank + 1) * share.numerator // share.denominator > taken:
                return source
            rank -= taken
        raise AssertionError("the last source takes all that is left")

    def _block(self, number: int) -> _Block:
        """The table of one block; the last one used is kept."""
        block = self._last_block
        if block is None or block.number != number:
            block = self._make_block(number)
            self._last_block = block
        return block

    def _make_block(self, number: int) -> _Block:
        ranks = Permutation(BLOCK, seed=self._seed, stream="mixing", epoch=number).forward(np.arange(BLOCK))
        sources = [self._source_at(number * BLOCK + rank) for rank in ranks.tolist()]
        counts, indices = self._before(number), []
        places: list[list[int]] = [[] for _ in self._shares]
        for place, source in enumerate(sources):
            indices.append(counts[source])
            counts[source] += 1
            places[source].append(place)
        return _Block(number, sources, indices, places)
