"""The compute limit follows from buckets, memory and exponent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance import limits
from repro.balance.cost import PowerCost, Range, reference_wan14b
from repro.balance.policies import DualConstraint

BUCKETS = np.array([1_560, 3_600, 7_800, 14_040, 18_000, 20_280, 26_520, 32_400, 32_760, 46_800])


def power(p=1.25):
    return PowerCost(
        a=0.08, b=1.7, p=p, layers=40, measured_layers=40, range=Range((1, 10**6), 10**7), source="made up"
    )


def test_longest_bucket_sets_the_limit():
    chosen = limits.choose(power(), BUCKETS, m_mem=58_896)
    assert chosen.m_comp == pytest.approx(46_800**1.25)
    assert chosen.target_seconds == pytest.approx(0.08 + 1.7 * 4.68**1.25)


def test_memory_for_two_of_the_longest_doubles_it():
    assert limits.choose(power(), BUCKETS, 93_600).m_comp == pytest.approx(2 * 46_800**1.25)


@given(
    tokens=st.lists(st.integers(64, 80_000), min_size=1, max_size=12, unique=True),
    spare=st.floats(1.0, 4.0),
    p=st.floats(1.0, 2.0),
)
@settings(derandomize=True, max_examples=100, deadline=None)
def test_nobody_outlasts_the_longest_and_it_is_filled_to_memory(tokens, spare, p):
    m_mem = int(spare * max(tokens))
    cost = power(p)
    chosen = limits.choose(cost, tokens, m_mem)
    batches = DualConstraint(chosen.m_mem, chosen.m_comp, chosen.p).batch_sizes(tokens)
    seconds = cost.seconds(batches, np.array(tokens))
    assert (batches * np.array(tokens) <= m_mem).all()
    assert seconds.max() <= chosen.target_seconds * (1 + 1e-6)
    assert batches[np.argmax(tokens)] == m_mem // max(tokens)


def test_target_of_any_form():
    cost = reference_wan14b()
    assert limits.target_seconds(cost, BUCKETS, 58_896) == pytest.approx(float(cost.seconds(1, 46_800)))


def test_a_cost_of_another_form_has_no_exponent():
    with pytest.raises(TypeError, match=r"must be of the power form, .*'power'\), got QuadraticCost"):
        limits.choose(reference_wan14b(), BUCKETS, 58_896)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1_560, 75_600], "75,600 tokens, more than the memory limit of 58,896"),
        ([], "at least one"),
        ([0, 5], "positive"),
    ],
)
def test_what_cannot_be_trained_is_named(tokens, message):
    with pytest.raises(ValueError, match=message):
        limits.choose(power(), tokens, 58_896)
