"""Dealing micro-batches to ranks within a step."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from repro.balance.assign import aligned, longest_first

RNG = np.random.default_rng(0)


def _dealt(cost: np.ndarray, index: np.ndarray) -> np.ndarray:
    return np.take_along_axis(cost, index.reshape(cost.shape), axis=1).reshape(index.shape)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_every_micro_batch_is_dealt_once_and_every_rank_gets_as_many(sync: str) -> None:
    cost = RNG.random((3, 12))
    for index in (longest_first(cost, 4, sync), aligned(cost, 4)):  # type: ignore[arg-type]
        assert index.shape == (3, 3, 4)
        assert np.array_equal(np.sort(index.reshape(3, -1), axis=1), np.tile(np.arange(12), (3, 1)))


def test_aligned_has_the_least_sum_of_slot_maxima_of_all_dealings() -> None:
    cost = RNG.integers(1, 50, size=(1, 6)).astype(float)
    best = min(sum(max(order[i : i + 2]) for i in (0, 2, 4)) for order in permutations(cost[0]))
    assert _dealt(cost, aligned(cost, 2)).max(axis=2).sum() == best


def test_aligned_balances_sums_within_the_slots() -> None:
    cost = np.array([[9.0, 1.0, 8.0, 2.0]])
    assert _dealt(cost, aligned(cost, 2)).sum(axis=1).tolist() == [[10.0, 10.0]]


def test_longest_first_goes_by_the_load_until_a_rank_is_full() -> None:
    cost = np.array([[22.0, 9.0, 12.0, 12.0, 12.0, 8.0]])
    sums = _dealt(cost, longest_first(cost, 2, "step")).sum(axis=1)
    # By hand: 22 | 12, 12; the third 12 goes to 22, the 9 to 24 and fills that rank, so that 8 goes to 34.
    assert sorted(sums[0]) == [33.0, 42.0]


def test_longest_first_is_near_the_mean_for_many_micro_batches() -> None:
    cost = RNG.uniform(8, 12, size=(1, 16 * 8))
    sums = _dealt(cost, longest_first(cost, 16, "step")).sum(axis=1)
    assert sums.max() < 1.01 * sums.mean()
