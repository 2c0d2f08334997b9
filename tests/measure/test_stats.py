"""Bootstrap intervals: seeded, covering, and right in simple cases."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.measure.stats import exact, measured, median_interval, ratio_interval, seed_text

SAMPLES = st.lists(st.floats(0.1, 1e6), min_size=1, max_size=40)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(SAMPLES)
def test_interval_holds_the_median_and_lies_within_the_samples(samples: list[float]) -> None:
    i = median_interval(samples, "key", resamples=200)
    assert min(samples) <= i.low <= i.value <= i.high <= max(samples)
    assert i.value == np.median(samples) and i.n == len(samples)


@settings(derandomize=True, max_examples=40, deadline=None)
@given(SAMPLES, SAMPLES)
def test_ratio_interval_holds_the_ratio(top: list[float], bottom: list[float]) -> None:
    i = ratio_interval(top, bottom, "key", resamples=200)
    assert i.low <= i.value <= i.high and i.value == pytest.approx(np.median(top) / np.median(bottom))
    assert i.n == min(len(top), len(bottom))


def test_interval_depends_on_samples_and_key_alone() -> None:
    samples = np.random.default_rng(0).normal(100, 5, 50)
    assert median_interval(samples, "a") == median_interval(list(samples), "a")
    assert median_interval(samples, "a", resamples=20) != median_interval(samples, "b", resamples=20)


def test_coverage_of_the_true_median() -> None:
    """A 95% interval misses the truth in about 5% of experiments; 300 of them leave it within 3 and 8.5% (3 sigma)."""
    generator = np.random.default_rng(1)
    hits = 0
    for k in range(300):
        i = median_interval(generator.lognormal(0, 0.3, 60), str(k), resamples=400)
        hits += i.low <= 1.0 <= i.high
    assert 0.915 <= hits / 300 <= 0.99


def test_ratio_of_independent_sides_is_wider_than_of_either() -> None:
    generator = np.random.default_rng(2)
    a, b = generator.normal(300, 10, 100), generator.normal(100, 4, 100)
    i = ratio_interval(a, b, "key")
    assert i.low < 3.0 < i.high
    for one_sided in (ratio_interval(a, np.full(100, 100.0), "key"), ratio_interval(np.full(100, 300.0), b, "key")):
        assert i.high - i.low > one_sided.high - one_sided.low > 0


def test_map_keeps_the_ends_in_order() -> None:
    i = median_interval([1.0, 2.0, 4.0], "key").map(lambda x: 8 / x)
    assert (i.value, i.low, i.high) == (4.0, 2.0, 8.0)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_bad_samples_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="sample"):
        median_interval(samples, "key")


def test_denominator_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0], [0.0, 1.0], "key")


def test_rows() -> None:
    row = measured("time", "us", median_interval([3.0, 1.0, 2.0], "key"), [3.0, 1.0, 2.0])
    assert (row.value, row.n, row.samples, row.kind) == (2.0, 3, (3.0, 1.0, 2.0), "measured")
    counted = exact("nodes", "nodes", 6)
    assert (counted.value, counted.ci_low, counted.ci_high, counted.n) == (6, 6, 6, 1)


def test_seed_text_does_not_depend_on_order() -> None:
    assert (
        seed_text("s", {"b": 1, "a": "x"}) == seed_text("s", {"a": "x", "b": 1}) != seed_text("t", {"a": "x", "b": 1})
    )
