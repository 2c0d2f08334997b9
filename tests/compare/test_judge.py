"""The verdict on two sets of samples: what counts as a change, what does not, and what cannot be told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.compare_judge import FEWEST, MOST, direction, judge, moved

OPPOSITE = {"FASTER": "SLOWER", "SLOWER": "FASTER", "SAME": "SAME", "AMBIGUOUS": "AMBIGUOUS"}


def times(median: float, spread: float = 0.005, count: int = 40, seed: int = 0) -> np.ndarray:
    return median * (1 + spread * np.random.default_rng(seed).standard_normal(count))


@pytest.mark.parametrize(
    ("factor", "spread", "word"),
    [
        (1.0, 0.005, "SAME"),
        (1.03, 0.005, "SAME"),  # significant by rank, and too small to matter
        (1.2, 0.005, "SLOWER"),
        (0.8, 0.005, "FASTER"),
        (1.05, 0.02, "AMBIGUOUS"),  # the interval crosses the threshold
        (1.0, 0.25, "AMBIGUOUS"),  # too noisy to call it the same
    ],
)
def test_words(factor: float, spread: float, word: str) -> None:
    found = judge(times(100.0, spread), times(100.0 * factor, spread, seed=1), "us", "case")
    assert found.word == word
    assert found.low <= found.ratio <= found.high
    assert found.ratio == pytest.approx(factor, rel=5 * spread / np.sqrt(40))


def test_a_rate_is_slower_where_it_falls() -> None:
    slower = judge(times(100.0), times(80.0, seed=1), "GB/s", "case")
    assert slower.word == "SLOWER" and slower.ratio == pytest.approx(1.25, rel=0.01)
    assert judge(times(100.0), times(125.0, seed=1), "1/s", "case").word == "FASTER"


def test_the_threshold_is_what_counts() -> None:
    before, after = times(100.0), times(103.0, seed=1)
    assert judge(before, after, "us", "case", threshold=0.05).word == "SAME"
    assert judge(before, after, "us", "case", threshold=0.01).word == "SLOWER"


def test_an_interval_beyond_the_threshold_needs_ranks_that_differ() -> None:
    """Twenty-two of thirty became slower and eight much faster: the median rose for sure, the ranks hardly."""
    before, after = np.array([1.0] * 22 + [9.0] * 8), np.array([1.2] * 22 + [0.5] * 8)
    found = judge(before, after, "us", "case")
    assert found.low > 1.1 and found.p > 0.05
    assert found.word == "AMBIGUOUS" and found.why.startswith("p = ")


@pytest.mark.parametrize(("counts", "why"), [((0, 40), "no samples"), ((3, 40), "3 samples"), ((40, 3), "3 samples")])
def test_too_few_samples_give_no_verdict(counts: tuple[int, int], why: str) -> None:
    found = judge(times(1.0, count=counts[0]), times(9.0, count=counts[1]), "us", "case")
    assert found.word == "AMBIGUOUS" and why in found.why
    assert judge(times(1.0, count=FEWEST), times(9.0, count=FEWEST), "us", "case").word == "SLOWER"


def test_a_sample_of_zero_is_told_and_not_divided_by() -> None:
    assert "not above 0" in judge(np.zeros(9), times(1.0), "us", "case").why


def test_many_samples_are_thinned() -> None:
    found = judge(times(1.0, count=50 * MOST), times(1.2, count=50 * MOST, seed=1), "us", "case")
    assert found.word == "SLOWER" and found.ratio == pytest.approx(1.2, rel=1e-3)


def test_what_is_neither_time_nor_rate_is_not_judged() -> None:
    assert [direction(u) for u in ("us", "s", "GB/s", "1/s", "GB", "%", "nodes", "x")] == [1, 1, -1, -1, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="'GB'"):
        judge(times(1.0), times(1.0), "GB", "case")
    with pytest.raises(ValueError, match="threshold"):
        judge(times(1.0), times(1.0), "us", "case", threshold=0.0)


@settings(derandomize=True, max_examples=30, deadline=None)
@given(
    factor=st.floats(0.5, 2.0),
    spread=st.sampled_from([0.001, 0.02, 0.2]),
    counts=st.tuples(st.integers(4, 60), st.integers(4, 60)),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_swapping_sides_swaps_the_verdict_and_units_do_not_matter(
    factor: float, spread: float, counts: tuple[int, int], scale: float
) -> None:
    before = np.abs(times(1.0, spread, counts[0])) + 1e-9
    after = np.abs(times(factor, spread, counts[1], seed=1)) + 1e-9
    word = judge(before, after, "us", "case").word
    assert judge(scale * before, scale * after, "us", "case").word == word
    swapped = judge(after, before, "us", "case")
    # the bootstrap of the other order draws other resamples: only verdicts with a margin must mirror
    if swapped.word != OPPOSITE[word]:
        ends = [swapped.low, swapped.high, 1 / swapped.low, 1 / swapped.high]
        assert min(abs(e - t) / t for e in ends for t in (1.05, 1 / 1.05)) < 0.25 * spread + 0.005


def test_what_moved_less_than_the_control_is_ambiguous() -> None:
    before, after = times(100.0), times(130.0, seed=1)
    assert judge(before, after, "us", "case", drift=0.1).word == "SLOWER"
    found = judge(before, after, "us", "case", drift=0.5)
    assert found.word == "AMBIGUOUS" and "streams moved by 50%" in found.why
    assert judge(before, times(100.0, seed=1), "us", "case", drift=0.5).word == "SAME"


def test_how_far_the_control_moved() -> None:
    assert moved([1.0, 2.0, 4.0], [1.1, 1.0, 4.0]) == pytest.approx(1.0), "halved counts as doubled"
    assert moved([], []) == 0.0 and moved([0.0], [1.0]) == 0.0
