import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.order import Permutation


def order(n: int, seed: int = 0, epoch: int = 0, stream: str = "s") -> Permutation:
    return Permutation(n, seed=seed, stream=stream, epoch=epoch)


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 9))
def test_is_a_permutation_and_has_an_inverse(n: int, seed: int, epoch: int) -> None:
    permutation = order(n, seed, epoch)
    image = permutation.forward(np.arange(n))
    assert sorted(image.tolist()) == list(range(n))
    assert permutation.inverse(image).tolist() == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 2**32 - 1, 2**32 + 1, 2**48 + 7])
def test_large_and_smallest_ranges_round_trip(n: int) -> None:
    permutation = order(n)
    index = np.unique(np.array([0, n // 3, n // 2, n - 1]))
    image = permutation.forward(index)
    assert image.max() < n
    assert permutation.inverse(image).tolist() == index.tolist()


@given(cuts=st.lists(st.integers(0, 500), max_size=6))
@settings(deadline=None, max_examples=20)
def test_a_range_may_be_cut_anywhere(cuts: list[int]) -> None:
    permutation = order(500)
    whole = permutation.forward(np.arange(500))
    edges = [0, *sorted(cuts), 500]
    parts = [permutation.forward(np.arange(a, b)) for a, b in itertools.pairwise(edges)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert [int(permutation.forward(index)) for index in (0, 77, 499)] == whole[[0, 77, 499]].tolist()


@pytest.mark.parametrize("other", [{"seed": 1}, {"epoch": 1}, {"stream": "t"}])
def test_seed_epoch_and_stream_each_make_another_order(other: dict[str, int]) -> None:
    same = (order(1000).forward(np.arange(1000)) == order(1000, **other).forward(np.arange(1000))).mean()
    assert same < 0.02  # chance gives 0.001


def test_the_order_never_changes_between_versions() -> None:
    assert order(1000, seed=7, epoch=3, stream="stdlib").forward(np.arange(6)).tolist() == [616, 229, 4, 553, 721, 684]


def test_is_not_linear() -> None:
    n = 10_000
    image = order(n).forward(np.arange(n)).astype(np.int64)
    steps = np.diff(image) % n
    assert len(np.unique(steps)) > 0.6 * n  # independent draws give 0.63 n; a linear map gives 1


@pytest.mark.parametrize("epoch", range(3))
def test_sorted_data_leave_no_trace(epoch: int) -> None:
    n = 10_000
    source = (np.arange(n) >= n // 2).astype(float)[order(n, epoch=epoch).forward(np.arange(n)).astype(np.int64)] - 0.5
    spectrum = np.abs(np.fft.rfft(source)) ** 2
    correlation = np.fft.irfft(spectrum)[1 : n // 2] / (source @ source)
    assert abs(correlation[:100]).max() < 4.5 / np.sqrt(n)
    assert abs(correlation).max() < 6 / np.sqrt(n)


def test_first_positions_are_uniform_over_keys() -> None:
    n, keys = 10, 4000
    counts = np.bincount([int(order(n, seed=seed).forward(0)) for seed in range(keys)], minlength=n)
    assert ((counts - keys / n) ** 2 / (keys / n)).sum() < 27.9  # chi-squared, 9 degrees, p = 0.001


@pytest.mark.parametrize("index", [-1, 10])
def test_outside_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="outside"):
        order(10).forward(index)
