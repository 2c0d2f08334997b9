"""Steps out of the window: which micro-batches go, and what forces them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance import window
from repro.balance.window import Rules, Stream


def _rules(starts: list[int], slots: int, ranks: int, reserve: float, buckets: int, patience: int = 99) -> Rules:
    return Rules(np.array(starts), slots, ranks, np.full(buckets, reserve), patience)


@given(data=st.data())
@settings(max_examples=50, derandomize=True, deadline=None)
def test_nearest_keeps_bounds_and_sums(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 8))
    starts = np.array([0, *sorted(data.draw(st.sets(st.integers(1, 7))) & set(range(1, size)))])
    group = np.repeat(np.arange(starts.size), np.diff(np.append(starts, size)))
    ints = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    low = np.array(data.draw(ints))
    high = low + np.array(data.draw(ints))
    due = np.array(data.draw(st.lists(st.floats(-5, 50), min_size=size, max_size=size)))
    batch = 1 + np.array(data.draw(ints))
    share = data.draw(st.floats(0, 1))
    least, most = np.add.reduceat(low, starts), np.add.reduceat(high, starts)
    wanted = np.floor(least + share * (most - least)).astype(np.int64)
    number = window.nearest(due, low, high, wanted, batch, starts, group)
    assert np.array_equal(np.add.reduceat(number, starts), wanted)
    assert np.all((low <= number) & (number <= high))


def test_nearest_lets_buckets_of_few_samples_give_way() -> None:
    batch = np.array([1, 30])
    due, none, plenty = np.array([10.0, 10.0]), np.zeros(2, int), np.full(2, 99)
    number = window.nearest(due, none, plenty, np.array([28]), batch, np.array([0]), np.zeros(2, int))
    assert number.tolist() == [18, 10]


def test_a_step_takes_the_groups_that_are_most_behind() -> None:
    # Three groups of one bucket each on four ranks, two slots: 9, 6 and 1 micro-batches behind, then 11, 3 and 2.
    rules = _rules([0, 1, 2], 2, 4, 0.0, 3)
    queue, batch = np.array([12, 12, 12]), np.ones(3, int)
    number = window.step(queue, batch, np.array([9.0, 6.0, 1.0]), np.zeros(3, int), rules, np.arange(3))
    assert number is not None
    assert number.tolist() == [4, 4, 0]
    number = window.step(queue, batch, np.array([11.0, 3.0, 2.0]), np.zeros(3, int), rules, np.arange(3))
    assert number is not None
    assert number.tolist() == [8, 0, 0]


def test_a_forced_micro_batch_has_company_of_the_next_cheaper() -> None:
    rules = _rules([0, 1, 2], 1, 4, 0.0, 3)
    queue, due, forced = np.array([1, 2, 9]), np.array([0.0, 0.0, 9.0]), np.array([1, 0, 0])
    number = window.step(queue, np.ones(3, int), due, forced, rules, np.arange(3))
    assert number is not None
    assert number.tolist() == [1, 2, 1]


def test_draining_ends_where_no_step_can_be_filled() -> None:
    rules = _rules([0, 1, 2], 2, 4, 0.0, 3)
    queue, batch, due = np.array([2, 2, 3]), np.ones(3, int), np.array([2.0, 2.0, 3.0])
    forced = np.array([1, 1, 1])  # three groups are forced, two slots would have to mix them, seven are too few
    assert window.step(queue, batch, due, forced, rules, np.arange(3), draining=True) is None
    assert window.step(queue + 1, batch, due, forced, rules, np.arange(3), draining=True) is not None
    assert window.step(np.array([5, 3, 3]), batch, due, np.zeros(3, int), rules, np.arange(3), draining=True) is None


def _first_wait(taken: window.Taken, stream: Stream) -> np.ndarray:
    """Steps that each sample waited from the step before which it was drawn, first in first out in each bucket."""
    drawn_in = np.searchsorted(taken.drawn, np.arange(stream.bucket.size), side="right")
    waits = []
    for k in range(stream.batch.size):
        used_in = np.repeat(np.arange(taken.drawn.size), taken.samples[:, k])
        waits.append(used_in - drawn_in[stream.bucket == k][: used_in.size])
    return np.concatenate(waits)


@given(
    seed=st.integers(0, 99),
    batch=st.lists(st.sampled_from([1, 2, 7, 30]), min_size=1, max_size=6),
    slots=st.integers(1, 4),
    ranks=st.sampled_from([1, 3, 8]),
    carried=st.floats(0.1, 4.0),
    slack=st.integers(1, 5),
)
@settings(max_examples=40, derandomize=True, deadline=None)
def test_waiting_is_bounded_by_patience_and_the_time_to_drain(
    seed: int, batch: list[int], slots: int, ranks: int, carried: float, slack: int
) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(len(batch), 0.3))
    stream = Stream.of(rng.choice(len(batch), 1_500, p=shares), np.array(batch))
    size = slots * ranks
    drain = int(np.ceil(1 + carried + len(batch) / size)) + 1
    rules = Rules(np.arange(len(batch)), slots, ranks, carried * size * shares, drain + slack)
    taken = window.take(stream, rules)
    assert np.all(taken.micro_batches.sum(axis=1) == size)
    assert np.array_equal(taken.samples.sum(axis=0) + taken.left, np.bincount(stream.bucket, minlength=len(batch)))
    if taken.drawn.size:
        assert _first_wait(taken, stream).max() <= rules.patience + drain


def test_where_more_is_overdue_than_fits_nothing_else_goes() -> None:
    # A window of six steps and a patience of one: nearly all of it is overdue at any time.
    rng = np.random.default_rng(0)
    stream = Stream.of(rng.choice(4, 4_000), np.ones(4, int))
    rules = Rules(np.arange(4), 2, 4, np.full(4, 10.0), patience=1)
    taken = window.take(stream, rules)
    middle = slice(10, np.searchsorted(taken.drawn, 4_000))
    arrived = np.stack([np.bincount(stream.bucket[:n], minlength=4) for n in taken.drawn])
    before = np.cumsum(taken.samples, axis=0) - taken.samples
    overdue = arrived[:-1] - before[1:]  # of what had arrived a step ago
    assert np.all(overdue[middle].sum(axis=1) > 8)
    assert np.all(taken.samples[1:][middle] <= overdue[middle])
    # Oldest first, whatever the bucket: all waited alike, and no longer than five steps' worth of window.
    waits = _first_wait(taken, stream)
    assert waits[np.flatnonzero(waits)].max() == 5


def test_of_more_than_fits_the_oldest_must_go() -> None:
    rules = _rules([0, 1], 2, 4, 0.0, 2, patience=1)
    arrived = [np.array(a) for a in ([0, 0], [6, 0], [9, 4], [20, 20], [40, 40])]
    gone, batch = np.array([3, 0]), np.array([1, 1])
    # A step ago 6 + 4 of those that are here had arrived, two more than fit; two steps ago 3 + 0: these, and five more.
    must = window.must_go(arrived[:4], gone, batch, rules)
    assert must.tolist() == [6, 2]
    assert window.must_go(arrived[:3], gone, batch, rules).tolist() == [3, 0]
    assert window.must_go(arrived[:2], gone, batch, rules).tolist() == [0, 0]
    assert window.must_go(arrived[:4], gone, np.array([4, 3]), rules).tolist() == [2, 2]


def test_steps_can_be_limited() -> None:
    stream = Stream.of(np.zeros(100, int), np.array([2]))
    taken = window.take(stream, _rules([0], 1, 4, 1.0, 1), steps=3)
    assert taken.samples.tolist() == [[8], [8], [8]]
    assert taken.drawn.tolist() == [10, 18, 26]
    with pytest.raises(IndexError):
        Stream.of(np.array([3]), np.array([2]))
