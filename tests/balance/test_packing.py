"""Cutting samples into micro-batches and dealing an epoch's rest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from repro.balance.packing import Buckets
from repro.balance.schedule import ABSENT, Layout


class PerToken:
    """A second for every thousand tokens."""

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.asarray(batch, np.float64) * np.asarray(tokens, np.float64) / 1_000


BUCKETS = Buckets(np.array([9_000, 2_000, 500]), np.array([1, 3, 8]), PerToken())


def test_all_micro_batches_are_full_but_the_last_of_a_bucket() -> None:
    bucket, batch = BUCKETS.cut(np.array([[1, 2, 0], [0, 1, 2]]), np.array([[1, 4, 0], [0, 3, 9]]))
    assert bucket.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.tolist() == [1, 3, 1, 3, 8, 1]


def test_a_rest_is_dealt_by_cost_and_its_cheapest_slot_ends_the_last_step() -> None:
    # Two of 9 s, five of 6 s, one of 4 s and one of 0.5 s: nine micro-batches, five slots of two, three steps of two.
    bucket, batch = BUCKETS.deal_rest(np.array([2, 15, 9]), Layout(2, 48_000, 2))
    seconds = BUCKETS.seconds(bucket, batch)
    assert bucket.shape == (3, 2, 2)
    assert seconds.max(axis=2).tolist() == [[6, 0], [9, 6], [6, 0.5]]
    assert np.all(bucket[0, 1] == ABSENT)
    assert sorted(batch[2, 1]) == [0, 1]  # one sample alone: the other rank gets a filler


def test_nothing_left_is_no_step() -> None:
    assert BUCKETS.deal_rest(np.zeros(3, int), Layout(4, 48_000, 2))[0].shape == (0, 2, 4)


def test_idle_ranks_take_from_the_dearest() -> None:
    # 9 s, 6 s of three samples and 4 s of eight on six ranks: the first cannot be cut, the others can.
    bucket, batch = BUCKETS.spread(np.array([0, 1, 2]), np.array([1, 3, 8]), 6)
    assert bucket.tolist() == [0, 1, 1, 1, 2, 2]
    assert batch.tolist() == [1, 1, 1, 1, 4, 4]


def test_fillers_only_where_every_sample_has_its_rank() -> None:
    bucket, batch = BUCKETS.spread(np.array([0, 1]), np.array([1, 2]), 5)
    assert bucket.tolist() == [0, 1, 1, 1, 1]
    assert batch.tolist() == [1, 1, 1, 0, 0]
