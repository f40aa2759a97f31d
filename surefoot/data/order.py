"""The order of samples: a keyed permutation of [0, n), computed at any point without a table.

A Feistel network over the smallest power of two that holds n, walked until it lands inside (Black and Rogaway, 2002,
Ciphers with Arbitrary Finite Domains). Unlike a linear map (a·i + b mod n) it leaves no structure through which sorted
data would show.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import ArrayLike, NDArray

_ROUNDS = 8
U64 = NDArray[np.uint64]


class Permutation:
    """A bijection of [0, n) fixed by its key; `seed`, `stream` and `epoch` make the key."""

    def __init__(self, n: int, *, seed: int, stream: str, epoch: int) -> None:
        if n < 1:
            raise ValueError(f"n is {n}; a permutation needs at least one element")
        self.n = n
        digest = hashlib.blake2b(
            f"surefoot order 1\n{seed}\n{epoch}\n{stream}".encode(), digest_size=8 * _ROUNDS
        ).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        num_bits = max(2, (n - 1).bit_length())
        low = num_bits // 2
        self._low_bits = np.uint64(low)
        self._masks = np.uint64((1 << (num_bits - low)) - 1), np.uint64((1 << low) - 1)

    def forward(self, index: ArrayLike) -> U64:
        """Where each index goes. Values outside [0, n) raise `IndexError`."""
        return self._walk(index, range(_ROUNDS))

    def inverse(self, index: ArrayLike) -> U64:
        """Which index goes there."""
        return self._walk(index, range(_ROUNDS - 1, -1, -1))

    def _walk(self, index: ArrayLike, rounds: range) -> U64:
        given = np.asarray(index)
        if given.size and (given.min() < 0 or given.max() >= self.n):
            raise IndexError(f"index outside [0, {self.n})")
        values = np.atleast_1d(given).astype(np.uint64)
        outside = np.ones(values.shape, dtype=bool)
        while outside.any():  # at most two tries on average: the domain is less than twice n (above n = 2)
            values[outside] = self._network(values[outside], rounds)
            outside = values >= self.n
        return values.reshape(given.shape)

    def _network(self, values: U64, rounds: range) -> U64:
        high_mask, low_mask = self._masks
        high, low = values >> self._low_bits, values & low_mask
        for number in rounds:  # each round changes one half by a function of the other, so it is its own inverse
            if number % 2 == 0:
                high = high ^ (_mix(low ^ self._keys[number]) & high_mask)
            else:
                low = low ^ (_mix(high ^ self._keys[number]) & low_mask)
        return (high << self._low_bits) | low


def _mix(x: U64) -> U64:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014); wraps modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
