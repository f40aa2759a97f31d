"""Schedules at their key points, their shape in between, and which progress a step uses."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import ConfigError, from_dict, to_dict
from surefoot.optim.schedule import WSD, Constant, Cosine, LinearToZero, Schedule, learning_rates, progress_of

fractions = st.floats(0.0, 1.0)
warmups = st.floats(0.01, 0.5)
finals = st.floats(0.0, 1.0)
schedules: st.SearchStrategy[Schedule] = st.one_of(
    st.builds(lambda w: Constant(warmup=w), warmups),
    st.builds(lambda w: LinearToZero(warmup=w), warmups),
    st.builds(lambda w, f: Cosine(warmup=w, final=f), warmups, finals),
    st.builds(
        lambda w, d, f, s: WSD(warmup=w, decay=d, final=f, shape=s),
        warmups, st.floats(0.05, 0.5), finals, st.sampled_from(["linear", "one_minus_sqrt"]),
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "points"),
    [
        (Constant(warmup=0.2), {0.0: 0.0, 0.1: 0.5, 0.2: 1.0, 0.6: 1.0, 1.0: 1.0}),
        (Constant(warmup=0.0), {0.0: 1.0, 1.0: 1.0}),
        (LinearToZero(warmup=0.2), {0.05: 0.25, 0.2: 1.0, 0.6: 0.5, 1.0: 0.0}),
        (LinearToZero(warmup=0.0), {0.0: 1.0, 0.25: 0.75, 1.0: 0.0}),
        (Cosine(warmup=0.2, final=0.1), {0.2: 1.0, 0.4: 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.6: 0.55, 1.0: 0.1}),
        (WSD(warmup=0.1, decay=0.4, shape="linear"), {0.1: 1.0, 0.6: 1.0, 0.7: 0.75, 0.9: 0.25, 1.0: 0.0}),
        (WSD(warmup=0.1, decay=0.4, shape="one_minus_sqrt", final=0.2), {0.6: 1.0, 0.7: 0.6, 1.0: 0.2}),
        (WSD(warmup=0.6, decay=0.4, shape="linear"), {0.3: 0.5, 0.6: 1.0, 0.8: 0.5, 1.0: 0.0}),
    ],
)
def test_key_points(schedule: Schedule, points: dict[float, float]) -> None:
    for progress, factor in points.items():
        assert schedule(progress) == pytest.approx(factor, abs=1e-12), progress


@given(schedules, fractions)
def test_factors_are_in_the_unit_interval(schedule: Schedule, progress: float) -> None:
    assert -1e-12 <= schedule(progress) <= 1 + 1e-12


@given(schedules, fractions, fractions)
def test_rises_through_the_warmup_and_never_after(schedule: Schedule, one: float, other: float) -> None:
    early, late = sorted((one, other))
    if late < schedule.warmup:
        assert schedule(early) <= schedule(late)
    elif early >= schedule.warmup:
        assert schedule(early) >= schedule(late) - 1e-12


@given(schedules, fractions)
def test_is_continuous(schedule: Schedule, progress: float) -> None:
    step = 1e-9
    # The steepest place is the start of 1 - sqrt, where a step of 1e-9 / decay moves the factor by its root.
    limit = max(step / schedule.warmup, math.sqrt(step / getattr(schedule, "decay", 1.0)), math.pi * step / 0.5) + 1e-12
    assert abs(schedule(min(1.0, progress + step)) - schedule(progress)) <= limit


def test_is_continuous_where_phases_meet() -> None:
    for schedule in (Cosine(warmup=0.3), LinearToZero(warmup=0.3), WSD(warmup=0.3, decay=0.3), Constant(warmup=0.3)):
        for joint in (0.3, 0.7):
            assert schedule(joint - 1e-12) == pytest.approx(schedule(joint + 1e-12), abs=1e-5)


@settings(max_examples=50)
@given(schedules, st.integers(1, 200))
def test_no_step_of_a_run_is_wasted(schedule: Schedule, num_steps: int) -> None:
    factors = learning_rates(schedule, num_steps)
    assert len(factors) == num_steps
    assert all(factor > 0 for factor in factors)


def test_steps_use_the_middle_of_their_share() -> None:
    assert [progress_of(step, 4) for step in range(4)] == [0.125, 0.375, 0.625, 0.875]
    assert progress_of(0, 1) == 0.5
    for step in (-1, 4):
        with pytest.raises(ValueError, match="not one of the 4 steps"):
            progress_of(step, 4)


def test_learning_rates_of_a_short_run() -> None:
    rates = learning_rates(LinearToZero(warmup=0.5), 4, lr=8.0)
    assert rates == pytest.approx([2.0, 6.0, 6.0, 2.0])
    assert learning_rates(LinearToZero(warmup=0.0), 1000)[-1] == pytest.approx(0.0005)


def test_the_mean_does_not_depend_on_the_number_of_steps() -> None:
    schedule = LinearToZero(warmup=0.25)
    means = [sum(learning_rates(schedule, num)) / num for num in (4, 8, 400)]
    assert means == pytest.approx([0.5, 0.5, 0.5])


def test_outside_the_run_is_an_error() -> None:
    for progress in (-0.01, 1.01, math.nan):
        with pytest.raises(ValueError, match="outside"):
            Constant()(progress)


@pytest.mark.parametrize(
    ("kind", "values", "path"),
    [
        (WSD, {"warmup": 0.5, "decay": 0.6}, "WSD.decay"),
        (WSD, {"shape": "cubic"}, "WSD.shape"),
        (Cosine, {"warmup": 1.0}, "Cosine.warmup"),
        (Cosine, {"final": 1.5}, "Cosine.final"),
        (Constant, {"warmpu": 0.1}, "Constant.warmpu"),
    ],
)
def test_bad_values_are_named(kind: type[Schedule], values: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**values)
    assert caught.value.path == path


def test_round_trip() -> None:
    for schedule in (Constant(), LinearToZero(), Cosine(final=0.3), WSD(shape="linear")):
        assert from_dict(to_dict(schedule), Schedule) == schedule


def test_every_shape_starts_its_decay_at_one() -> None:
    for first, second in itertools.pairwise(
        (Cosine(warmup=0.1), LinearToZero(warmup=0.1), Constant(warmup=0.1), WSD(warmup=0.1))
    ):
        assert first(0.1) == second(0.1) == 1.0
