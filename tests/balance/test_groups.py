"""Divisions into cost groups."""

from __future__ import annotations

import numpy as np
import pytest

from repro.balance.groups import MAX_CUTS, candidates


def test_steep_falls_are_cut_and_flat_ones_are_not() -> None:
    seconds = np.array([22.0, 12.5, 12.4, 12.3, 8.6, 8.5])
    found = {tuple(c) for c in candidates(seconds, np.array([1, 1, 1, 2, 13, 30]), np.full(6, 2 / 6), 8, 2.0)}
    assert (0, 1, 4) in found
    assert all(starts[0] == 0 and np.all(np.diff(starts) > 0) for starts in found)
    assert all(1 in starts for starts in found if len(starts) > 1), "the fall from 22 to 12.5 is cut first"


def test_one_bucket_is_one_group() -> None:
    assert [c.tolist() for c in candidates(np.array([5.0]), np.array([4]), np.array([8.0]), 8, 1.0)] == [[0]]


def test_whole_numbers_of_slots_need_no_company() -> None:
    # Each bucket fills two slots a step exactly: no rounding, no mixing, so that nothing speaks for groups of two.
    found = candidates(np.array([10.0, 9.0, 8.0]), np.array([1, 2, 3]), np.full(3, 2.0), 16, 6.0)
    assert [c.tolist() for c in found] == [[0, 1, 2]]


@pytest.mark.parametrize("buckets", [60, 300])
def test_many_buckets_of_nearly_one_cost_stay_quick(buckets: int) -> None:
    seconds = np.linspace(20, 10, buckets)
    seconds[: buckets // 2] += 5
    found = candidates(seconds, np.full(buckets, 2), np.full(buckets, 8 / buckets), 64, 8.0)
    assert all(len(starts) <= MAX_CUTS + 1 for starts in found)
    assert any(buckets // 2 in starts for starts in found)
