"""Thinning and smoothing on series whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.report.series import MAX_POINTS, smooth, thin


def test_long_series_keep_spikes_ends_and_gaps() -> None:
    values = np.sin(np.arange(150_000) / 9_000)
    values[70_001], values[90_003] = 50.0, -50.0
    values[100_007] = np.nan
    kept = thin(values)
    assert len(kept) <= MAX_POINTS
    assert {0, 70_001, 90_003, 100_007, 149_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6_000), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_thinning_keeps_the_range(size: int, seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(size=size)
    values[random.random(size) < share] = np.nan
    kept = thin(values)
    assert len(kept) <= min(size, MAX_POINTS)
    assert len(kept) == size or len(kept) > 600
    if np.isfinite(values).any():
        assert np.nanmin(values[kept]) == np.nanmin(values)
        assert np.nanmax(values[kept]) == np.nanmax(values)


def test_short_series_are_whole() -> None:
    assert thin(np.full(MAX_POINTS, np.nan)).tolist() == list(range(MAX_POINTS))


def test_smoothing_has_no_lag_and_leaves_gaps() -> None:
    line = np.arange(500.0)
    means = smooth(line, 5)
    np.testing.assert_allclose(means[:-5], line[:-5], atol=1e-9)
    assert means[-1] == pytest.approx(line[-6:].mean())
    line[250] = np.nan
    means = smooth(line, 5)
    assert np.isnan(means[250])
    assert np.isfinite(np.delete(means, 250)).all()
    assert means[249] == pytest.approx(np.nanmean(line[244:255]))


def test_a_huge_value_stays_in_its_window() -> None:
    values = np.ones(1_000)
    values[100] = 1e30
    means = smooth(values, 10)
    assert (means[111:] == 1.0).all()


def test_nothing_to_smooth() -> None:
    assert smooth(np.array([]), 0).tolist() == []
    assert smooth(np.array([3.0, 1.0]), 0).tolist() == [3.0, 1.0]
