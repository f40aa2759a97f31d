"""`Documents`: where documents lie in a batch, told once and read by attention, rope, loss and state mixers alike.

Legend: B batch, L length (queries), S keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class Reach(NamedTuple):
    """How far back a query sees: itself and the `window` - 1 tokens before it (None: all), and the `first` of its document."""

    window: int | None = None
    first: int = 0

    @property
    def most(self) -> int | None:
        """The most keys that a query sees, None where nothing bounds them."""
        return None if self.window is None else self.window + self.first


EVERYTHING = Reach()


class Documents:
    """The documents of a packed batch, or one document that continues from `start` positions already seen.

    `ids_BL` numbers the documents of each row in order (padding has a number of its own); `None` says that each row is a
    single document. `positions` counts from the start of each token's own document: (L) when all rows agree, else (B, L).

    A sequence may be handled in parts. `run` is one stretch of it over all keys up to its end; `cut` is several stretches
    laid end to end, which know nothing of the tokens between them: positions go on counting in the whole sequence, and
    `whole` and `runs` say what was cut.
    """

    def __init__(
        self, ids_BS: Tensor | None, length: int, *, start: int = 0, device: torch.device | None = None
    ) -> None:
        """`ids_BS` covers the `start` positions already seen too."""
        self.length, self.start = length, start
        self.whole: Documents | None = None
        self.runs: tuple[slice, ...] = (slice(start, start + length),)
        is_packed = ids_BS is not None and bool((ids_BS != ids_BS[:, :1]).any())
        if is_packed and ids_BS is not None and ids_BS.shape[1] != start + length:
            raise ValueError(
                f"a packed batch of {ids_BS.shape[1]} positions cannot stand for {start} + {length}: "
                "it tells nothing of the documents before it, so start must be 0"
            )
        self._ids_BS = ids_BS if is_packed else None
        device = device or (ids_BS.device if ids_BS is not None else None)
        positions = torch.arange(start + length, device=device)
        if self._ids_BS is not None:
            index_BS = positions.expand_as(self._ids_BS)
            is_first_BS = torch.ones_like(self._ids_BS, dtype=torch.bool)
            is_first_BS[:, 1:] = self._ids_BS[:, 1:] != self._ids_BS[:, :-1]
            positions = index_BS - torch.where(is_first_BS, index_BS, 0).cummax(1).values
        self._key_positions = positions
        self.positions = positions[..., start:]
        self.ids_BL = None if self._ids_BS is None else self._ids_BS[:, start:]
        self._derived: dict[object, Any] = {}

    @property
    def is_packed(self) -> bool:
        """Whether some row holds more than one document."""
        return self.ids_BL is not None

    def derive(self, key: object, make: Callable[[], R]) -> R:
        """What `make` returns, made once for all layers that ask under the same key."""
        if key not in self._derived:
            self._derived[key] = make()
        value: R = self._derived[key]
        return value

    def mask(self, reach: Reach = EVERYTHING) -> Tensor:
        """What each query may see, broadcastable to (B, heads, L, S): itself and earlier tokens of its document, in reach."""
        stop = self.start + self.length
        return self.derive(("mask", reach), lambda: self.mask_between(slice(self.start, stop), slice(0, stop), reach))

    def mask_between(self, queries: slice, keys: slice | Tensor, reach: Reach = EVERYTHING) -> Tensor:
        """What the queries of one run of the sequence may see of the keys of another, broadcastable as `mask` is."""
        if self.whole is not None:
            raise ValueError("a cut sequence holds some of the keys only: ask its whole")
        device = self.positions.device
        queries_L = torch.arange(queries.start, queries.stop, device=device)
        keys_S = torch.arange(keys.start, keys.stop, device=device) if isinstance(keys, slice) else keys
        mask = (queries_L[:, None] >= keys_S)[None, None]
        if reach.window is not None:
            is_first = (self._key_positions[..., keys] < reach.first).view(-1, 1, 1, len(keys_S))
            mask = mask & (is_first | (queries_L[:, None] - keys_S < reach.window))
        if self._ids_BS is not None:
            mask = mask & (self._ids_BS[:, None, queries, None] == self._ids_BS[:, None, None, keys])
        return mask

    def over(self, num_keys: int) -> Documents:
        """The same queries where of all keys so far `num_keys` are left: what is not kept any more is as if it had not been."""
        start = num_keys - self.length
        return self if start == self.start else Documents(None, self.length, start=start, device=self.positions.device)

    def run(self, start: int, stop: int) -> Documents:
        """The queries from `start` to `stop` by themselves, over all keys up to `stop`. For a sequence that starts at 0."""
        ids_BS = None if self._ids_BS is None else self._ids_BS[:, :stop]
        device = self.positions.device
        return self.derive(("run", start, stop), lambda: Documents(ids_BS, stop - start, start=start, device=device))

    def cut(self, runs: Sequence[slice]) -> Documents:
        """Those runs of the sequence, end to end; attention between them needs a form that finds the keys elsewhere."""
        part = Documents(None, sum(run.stop - run.start for run in runs), device=self.positions.device)
        part.whole, part.runs = self, tuple(runs)
        part.positions = _take(self.positions, runs)
        part.ids_BL = None if self.ids_BL is None else _take(self.ids_BL, runs)
        return part


def _take(x: Tensor, runs: Sequence[slice]) -> Tensor:
    return torch.cat([x[..., run] for run in runs], -1)
