from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.mixing import BLOCK, Mixing

weights_strategy = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@settings(deadline=None, max_examples=80)
@given(weights=weights_strategy, seed=st.integers(0, 99), start=st.integers(0, 10**9))
def test_every_sample_of_every_source_has_one_place(weights: list[float], seed: int, start: int) -> None:
    mixing = Mixing(weights, seed=seed)
    for sample in range(start, start + 50):
        source, index = mixing.locate(sample)
        assert mixing.sample_of(source, index) == sample


@settings(deadline=None, max_examples=15)
@given(weights=weights_strategy, num_samples=st.integers(0, 3 * BLOCK))
def test_each_source_is_read_in_sequence_without_gaps(weights: list[float], num_samples: int) -> None:
    mixing = Mixing(weights, seed=1)
    found: list[list[int]] = [[] for _ in weights]
    for sample in range(num_samples):
        source, index = mixing.locate(sample)
        found[source].append(index)
    assert found == [list(range(len(indices))) for indices in found]
    assert mixing.counts(num_samples) == [len(indices) for indices in found]


@settings(deadline=None, max_examples=60)
@given(weights=weights_strategy, blocks=st.integers(1, 10**6))
def test_counts_stay_within_one_sample_a_source_for_ever(weights: list[float], blocks: int) -> None:
    counts = Mixing(weights, seed=0).counts(blocks * BLOCK)
    exact = [Fraction(weight) for weight in weights]
    assert sum(counts) == blocks * BLOCK
    for count, weight in zip(counts, exact, strict=True):
        assert abs(count - blocks * BLOCK * weight / sum(exact)) < len(weights)


def test_sources_come_in_no_regular_pattern() -> None:
    mixing = Mixing([1.0, 1.0], seed=0)
    source = np.array([mixing.locate(sample)[0] for sample in range(10_000)]) - 0.5
    correlation = [source[lag:] @ source[:-lag] / (source @ source) for lag in range(1, 60)]
    assert max(map(abs, correlation)) < 0.05  # unshuffled they alternate: 1


def test_another_seed_is_another_mixture() -> None:
    one, two = ([Mixing([1, 2], seed=seed).locate(g)[0] for g in range(500)] for seed in (0, 1))
    assert one != two


@pytest.mark.parametrize("weights", [[], [0.0], [1.0, -1.0]])
def test_shares_must_be_positive(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Mixing(weights, seed=0)
