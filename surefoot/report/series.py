"""Series fit to be drawn: smoothed without lag, thinned without losing a spike."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from surefoot.report.reading import Column

MAX_POINTS = 2000


def smoothing_width(num_points: int) -> int:
    """Points the running mean looks to either side: a hundredth of the series, 100 at most."""
    return min(100, num_points // 100)


def smooth(values: Column, width: int) -> Column:
    """Mean over up to `width` points on either side; NaN stays a gap and enters no mean.

    Near the start the window is narrower, a quarter of the way back, so that the steep first part of a loss curve is
    not averaged with what follows; at the end it keeps its left half.
    """
    if not width:
        return values
    finite = np.isfinite(values)
    window = 2 * width + 1
    # Sums over each window, not differences of one running sum: a single huge value would take the digits of the rest.
    sums, counts = (
        sliding_window_view(np.pad(part, width), window).sum(axis=1)
        for part in (np.where(finite, values, 0.0), finite * 1.0)
    )
    for index in range(min(4 * width, len(values))):
        reach = index // 4
        part = values[index - reach : index + reach + 1]
        part = part[np.isfinite(part)]
        sums[index], counts[index] = part.sum(), len(part)
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)


def thin(values: Column, limit: int = MAX_POINTS) -> NDArray[np.intp]:
    """Indices of at most `limit` points to draw: both ends and, of every bin, the lowest, the highest and one gap."""
    size = len(values)
    if size <= limit:
        return np.arange(size)
    num_bins = (limit - 2) // 3
    edges = np.linspace(0, size, num_bins + 1).astype(np.intp)
    kept = {0, size - 1}
    for low, high in itertools.pairwise(edges):
        part = values[low:high]
        finite = np.isfinite(part)
        if not finite.all():
            kept.add(int(low + np.argmin(finite)))
        if finite.any():
            kept.update((int(low + np.nanargmin(part)), int(low + np.nanargmax(part))))
    return np.array(sorted(kept), dtype=np.intp)
