"""Packing: windows of L positions over a split's stream, each position in exactly one window.

Legend: L length of a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from surefoot.data.shards import Split

IGNORED = -100
"""Target of a position that predicts nothing: a document's closing separator, and padding."""


@dataclass(frozen=True)
class Window:
    """`documents_L` counts documents from 0 in the window; padding has the number after the last."""

    tokens_L: NDArray[np.int64]
    targets_L: NDArray[np.int64]
    documents_L: NDArray[np.int32]


class Packing:
    """Windows with stride L. An incomplete last window is dropped, or kept and padded with the id `pad`."""

    def __init__(self, split: Split, length: int, *, keep_last: bool, pad: int) -> None:
        self.split, self.length, self._pad = split, length, pad
        num_ids = len(split.ids)
        self.num_windows = -(-num_ids // length) if keep_last else num_ids // length

    def window(self, index: int) -> Window:
        """Window `index` of [0, num_windows)."""
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window {index} of {self.num_windows}")
        ids, ends, length = self.split.ids, self.split.ends, self.length
        start = index * length
        stop = min(start + length, len(ids))
        read = ids[start : stop + 1].astype(np.int64)  # one more than the inputs: the last one's target
        tokens_L = np.full(length, self._pad, np.int64)
        targets_L = np.full(length, IGNORED, np.int64)
        tokens_L[: stop - start] = read[: stop - start]
        targets_L[: len(read) - 1] = read[1:]
        first = int(np.searchsorted(ends, start, side="right"))
        last = int(np.searchsorted(ends, stop - 1, side="right"))
        closing = ends[first : last + 1] - 1 - start
        targets_L[closing[closing < stop - start]] = IGNORED
        documents_L = np.searchsorted(ends[first : last + 1], np.arange(start, start + length), side="right")
        documents_L[stop - start :] = last - first + 1
        return Window(tokens_L, targets_L, documents_L.astype(np.int32))

    @cached_property
    def num_targets(self) -> NDArray[np.int64]:
        """Valid targets of each window, without reading the ids."""
        num_ids = len(self.split.ids)
        starts = np.arange(self.num_windows, dtype=np.int64) * self.length
        counts = np.minimum(self.length, num_ids - starts)
        closing = (self.split.ends - 1) // self.length
        return counts - np.bincount(closing, minlength=self.num_windows)[: self.num_windows]

    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        """(document, start, end) of window `index`: which documents, and which of their stored positions it covers."""
        ends = self.split.ends
        start, stop = index * self.length, min((index + 1) * self.length, len(self.split.ids))
        first = int(np.searchsorted(ends, start, side="right"))
        found = []
        for document in range(first, len(ends)):
            begin = int(ends[document - 1]) if document else 0
            if begin >= stop:
                break
            found.append((document, max(start, begin) - begin, min(stop, int(ends[document])) - begin))
        return found

    def windows_of(self, document: int) -> range:
        """The windows that hold a part of a document."""
        begin = int(self.split.ends[document - 1]) if document else 0
        last = (int(self.split.ends[document]) - 1) // self.length
        return range(min(begin // self.length, self.num_windows), min(last + 1, self.num_windows))
