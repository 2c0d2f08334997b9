"""Schedules in array form, the steps that they deal, and their checks."""

from __future__ import annotations

import numpy as np
import pytest

from repro.balance.schedule import ABSENT, Layout, Schedule, fold, largest_batches, shuffled
from repro.corpus.shapes import Corpus, Shape

IMAGE, CLIP = Shape(1, 480, 832), Shape(17, 480, 832)
CORPUS = Corpus("two", "", (IMAGE, CLIP), np.array([1_560, 7_800]), np.array([0, 1, 0, 0, 1], dtype=np.int32))
# Two steps on two ranks: images 0, 2 | clip 1, then image 3 | clip 4; slot 1 of step 1 is absent.
BUCKET = np.array([[[0, 1], [0, 0]], [[1, 0], [ABSENT, ABSENT]]], dtype=np.int32)
BATCH = np.array([[[2, 1], [1, 0]], [[1, 0], [0, 0]]], dtype=np.int32)
ORDER = np.array([3, 0, 2, 4, 1])


def test_steps_deal_each_bucket_in_order() -> None:
    schedule = Schedule(CORPUS, BUCKET, BATCH, ORDER)
    (first, second), (third, filler) = schedule.step(0).ranks
    assert (first.shape, first.sample_ids) == (IMAGE, (3, 0))
    assert (third.shape, third.sample_ids) == (CLIP, (4,))
    assert (second.sample_ids, second.weights) == ((2,), (0.25,))
    assert (filler.shape, filler.sample_ids, filler.weights) == (IMAGE, (3,), (0.0,))
    assert [m.sample_ids for rank in schedule.step(1).ranks for m in rank] == [(1,), (3,)]
    assert schedule.slots_of_step.tolist() == [2, 1]
    assert schedule.samples_of_step.tolist() == [4, 1]
    assert schedule.fillers == 2


def test_weights_make_the_global_mean_or_the_mean_of_batch_means() -> None:
    schedule = Schedule(CORPUS, BUCKET, BATCH, ORDER)
    exact = [m.weights for rank in schedule.step(0).ranks for m in rank]
    assert exact == [(0.25, 0.25), (0.25,), (0.25,), (0.0,)]
    means = [m.weights for rank in schedule.step(0, "batch_mean").ranks for m in rank]
    assert means == [(1 / 6, 1 / 6), (1 / 3,), (1 / 3,), (0.0,)]
    with pytest.raises(ValueError, match="weighting"):
        schedule.micro_batches(0, 0, "token")  # type: ignore[arg-type]
    with pytest.raises(IndexError, match="step 2, rank 0"):
        schedule.micro_batches(2, 0)


def test_a_schedule_that_breaks_the_contract_is_refused() -> None:
    twice = BATCH.copy()
    twice[0, 0, 0] = 3
    with pytest.raises(ValueError, match="bucket 0 has 3 samples, the schedule deals 4"):
        Schedule(CORPUS, BUCKET, twice, ORDER)
    uneven = BUCKET.copy()
    uneven[1, 1, 0] = 0
    with pytest.raises(ValueError, match="absent on some ranks only"):
        Schedule(CORPUS, uneven, BATCH, ORDER)
    with pytest.raises(ValueError, match="waits 3 steps, the limit is 2"):
        Schedule(CORPUS, BUCKET, BATCH, ORDER, max_wait_steps=3, wait_limit_steps=2)


def test_fold_alternates_where_slots_a_step_are_not_whole() -> None:
    slots = np.zeros((10, 2), dtype=np.int32)
    bucket, _ = fold(slots, slots, 2.5)
    assert (bucket[:, :, 0] != ABSENT).sum(axis=1).tolist() == [2, 3, 2, 3]
    bucket, _ = fold(slots, slots, 4.0)
    assert (bucket[:, :, 0] != ABSENT).sum(axis=1).tolist() == [4, 4, 2]


def test_fold_gives_every_step_a_slot() -> None:
    slots = np.zeros((3, 2), dtype=np.int32)
    assert fold(slots, slots, 0.4)[0].shape == (3, 1, 2)


def test_order_is_drawn_anew_for_each_seed_and_epoch() -> None:
    corpus = Corpus("n", "", CORPUS.shapes, CORPUS.tokens, np.arange(100, dtype=np.int32) % 2)
    drawn, by_bucket = shuffled(corpus, seed=1, epoch=0)
    assert sorted(drawn) == list(range(100))
    assert corpus.bucket_of[drawn[by_bucket]].tolist() == [0] * 50 + [1] * 50
    assert np.all(np.diff(by_bucket[:50]) > 0)  # within a bucket, as drawn
    for other in (shuffled(corpus, 2, 0), shuffled(corpus, 1, 1)):
        assert not np.array_equal(drawn, other[0])


def test_largest_batches_name_the_sample_that_does_not_fit() -> None:
    assert largest_batches(CORPUS, 8_000).tolist() == [5, 1]
    with pytest.raises(ValueError, match=r"sample 1 \(17x480x832, 7800 tokens\) exceeds the memory limit of 7000"):
        largest_batches(CORPUS, 7_000)
    unused = Corpus("images", "", CORPUS.shapes, CORPUS.tokens, np.zeros(3, dtype=np.int32))
    assert largest_batches(unused, 7_000).tolist() == [4, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"m_mem": 0}, "m_mem must be at least 1"),
        ({"sync": "layer"}, "sync must be"),
        ({"protocol": "fair"}, "protocol must be"),
    ],
)
def test_layouts_that_no_run_can_have(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**{"ranks": 2, "m_mem": 48_000, **change})  # type: ignore[arg-type]
