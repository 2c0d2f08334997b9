"""Steps predicted from solo times, and the work in them."""

import numpy as np
import pytest

from repro.balance import replay
from repro.balance.schedule import Layout, Schedule
from repro.corpus.shapes import Corpus, Shape

CORPUS = Corpus(
    "two", "made up", (Shape(1, 32, 32), Shape(1, 64, 64)), np.array([4, 16]), np.array([0] * 8 + [1] * 2, np.int32)
)
SOLO = replay.SoloTimes({(4, 4): 1.0, (1, 4): 0.5, (1, 16): 3.0})


def schedule(bucket, batch):
    order = np.argsort(CORPUS.bucket_of, kind="stable")
    return Schedule(CORPUS, np.array(bucket, np.int32), np.array(batch, np.int32), order)


@pytest.fixture
def two_steps():
    """Two steps of two slots on two ranks; the last slot has a filler beside it."""
    return schedule([[[0, 1], [0, 1]], [[0, 0], [-1, -1]]], [[[4, 1], [3, 1]], [[1, 0], [0, 0]]])


def test_a_step_takes_its_slowest_ranks_wherever_they_meet(two_steps):
    solo = replay.SoloTimes({**SOLO.times, (3, 4): 0.9})
    assert replay.predict(two_steps, solo, 0.25, "micro_batch") == pytest.approx([6.25, 0.75])
    assert replay.predict(two_steps, solo, 0.25, "step") == pytest.approx([6.25, 0.75])
    mixed = schedule([[[0, 1], [1, 0]], [[0, 0], [-1, -1]]], [[[4, 1], [1, 3]], [[1, 0], [0, 0]]])
    assert replay.predict(mixed, solo, 0.0, "micro_batch")[0] == pytest.approx(6.0)
    assert replay.predict(mixed, solo, 0.0, "step")[0] == pytest.approx(4.0)


def test_what_is_to_be_measured_is_what_is_used(two_steps):
    cells = replay.micro_batches(two_steps, 16)
    assert cells == [(0, 1), (0, 3), (0, 4), (1, 1)]
    tokens = CORPUS.tokens
    with pytest.raises(KeyError):
        replay.predict(two_steps, SOLO, 0.0, "step")
    replay.predict(two_steps, replay.SoloTimes({(b, int(tokens[k])): 1.0 for k, b in cells}), 0.0, "step")


def test_work_is_that_of_full_micro_batches_shared_by_all_ranks(two_steps):
    work = replay.work_seconds(two_steps, Layout(2, 16), SOLO, 0.25)
    assert work == pytest.approx([(7 * 0.25 + 2 * 3.0) / 2 + 0.25, 0.25 / 2 + 0.25])


def test_errors_of_steps_and_of_all_of_them():
    found = replay.Errors.of([1.1, 1.8], [1.0, 2.0])
    assert found.each == pytest.approx(10.0) and found.total == pytest.approx(-10 / 3)
