"""`Documents`: where documents lie in a batch, told once and read by attention, rope, loss and state mixers alike.

Legend: B batch, L length (queries), S keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")


class Documents:
    """The documents of a packed batch, or one document that continues from `start` positions already seen.

    `ids_BL` numbers the documents of each row in order (padding has a number of its own); `None` says that each row is a
    single document. `positions` counts from the start of each token's own document: (L) when all rows agree, else (B, L).
    """

    def __init__(
        self, ids_BL: Tensor | None, length: int, *, start: int = 0, device: torch.device | None = None
    ) -> None:
        self.length, self.start = length, start
        is_packed = ids_BL is not None and bool((ids_BL != ids_BL[:, :1]).any())
        if is_packed and start:
            raise ValueError("a packed batch cannot continue from a state: start must be 0")
        self.ids_BL = ids_BL if is_packed else None
        device = device or (ids_BL.device if ids_BL is not None else None)
        self.positions = torch.arange(start, start + length, device=device)
        if self.ids_BL is not None:
            index_BL = self.positions.expand_as(self.ids_BL)
            is_first_BL = torch.ones_like(self.ids_BL, dtype=torch.bool)
            is_first_BL[:, 1:] = self.ids_BL[:, 1:] != self.ids_BL[:, :-1]
            self.positions = index_BL - torch.where(is_first_BL, index_BL, 0).cummax(1).values
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

    def mask(self) -> Tensor:
        """What each query may see, broadcastable to (B, heads, L, S): earlier tokens of its own document and itself."""
        return self.derive("mask", self._make_mask)

    def _make_mask(self) -> Tensor:
        keys_S = torch.arange(self.start + self.length, device=self.positions.device)
        queries_L = keys_S[self.start :]
        mask = (queries_L[:, None] >= keys_S)[None, None]
        if self.ids_BL is not None:
            mask = mask & (self.ids_BL[:, None, :, None] == self.ids_BL[:, None, None, :])
        return mask
