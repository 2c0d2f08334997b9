"""Steps dealt over epochs and interruptions, for all ranks at once and without processes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.schedule import Layout
from repro.wan.epochs import Epochs, ResumeError
from tests.wan import standin
from tests.wan.gradient_ranks import M_MEM, policy

SAMPLES = 50


def all_ranks(ranks, name="balanced", samples=SAMPLES, seed=4):
    layout = Layout(ranks, M_MEM, 2)
    return [Epochs(policy(name), standin.corpus(samples), layout, rank, seed) for rank in range(ranks)]


def dealt(group, steps):
    """(epoch, id) of the samples of the next steps over all ranks; ranks must agree on what all do."""
    found = []
    for of_ranks in islice(zip(*group, strict=True), steps):
        batch = np.array([[len(m.sample_ids) * any(m.weights) for m in step.micro_batches] for step in of_ranks])
        for step in of_ranks:
            assert step.epoch == of_ranks[0].epoch
            np.testing.assert_array_equal(step.batch, batch.T)
        assert sum(w for s in of_ranks for m in s.micro_batches for w in m.weights) == pytest.approx(1)
        found += [(s.epoch, i) for s in of_ranks for m in s.micro_batches if any(m.weights) for i in m.sample_ids]
    return found


def interrupted(group, ranks, name):
    """The group that goes on from this one, after a round trip through JSON; and what it says has changed."""
    state, used = json.loads(json.dumps(group[0].state())), group[0].used()
    successors = all_ranks(ranks, name, seed=0)
    changed, *_ = [e.resume(state, used.copy()) for e in successors]
    return successors, changed


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 9), st.sampled_from(("balanced", "equal_token"))),
        min_size=2,
        max_size=4,
    )
)
@settings(derandomize=True, max_examples=40, deadline=None)
def test_every_sample_once_an_epoch_whatever_interrupts_it(parts):
    ranks, steps, name = parts[0]
    group = all_ranks(ranks, name)
    found = dealt(group, steps)
    for ranks, steps, name in parts[1:]:
        group, _ = interrupted(group, ranks, name)
        found += dealt(group, steps)
    seen = Counter(found)
    last = max((epoch for epoch, _ in seen), default=0)
    assert set(seen.values()) <= {1}
    for epoch in range(last):
        assert {i for e, i in seen if e == epoch} == set(range(SAMPLES)), "an epoch ends when all were used"


@pytest.mark.parametrize("steps", [0, 1, 3, 100])
def test_unchanged_runs_go_on_exactly(steps):
    whole, parted = all_ranks(2), all_ranks(2)
    expected = dealt(whole, steps + 12)
    before = dealt(parted, steps)
    parted, changed = interrupted(parted, 2, "balanced")
    assert changed == [] and before + dealt(parted, 12) == expected


def test_an_unchanged_run_goes_on_exactly_within_a_remainder():
    group, _ = interrupted(_after(all_ranks(2), 3), 3, "balanced")
    dealt(group, 2)
    group, changed = interrupted(group, 3, "balanced")
    assert changed == []
    again, _ = interrupted(_after(all_ranks(2), 3), 3, "balanced")
    dealt(again, 2)
    assert dealt(group, 20) == dealt(again, 20)


def test_it_says_what_changed():
    _, changed = interrupted(_after(all_ranks(2), 2), 4, "equal_token")
    assert changed[:2] == ["policy: balanced -> equal_token", "ranks: 2 -> 4"]
    assert "samples left of epoch 0 are dealt anew" in changed[-1]


def test_another_corpus_is_refused():
    state, used = all_ranks(1)[0].state(), all_ranks(1)[0].used()
    with pytest.raises(ResumeError, match="another corpus"):
        all_ranks(1, samples=SAMPLES + 1)[0].resume(state, used)


def _after(group, steps):
    dealt(group, steps)
    return group
