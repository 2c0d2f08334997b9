"""Costs and limits that a run's batch policy is made of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from repro.balance.models import MODELS, WAN_1_3B, WAN_14B
from repro.corpus import mixes
from repro.records import Store
from repro.wan import batching
from repro.wan.batching import MODES, BatchLimits

STORE = Store(Path(__file__).resolve().parents[2] / "results")


@pytest.fixture(scope="module")
def corpus():
    return mixes.named("wan-uniform", 1_000)


@pytest.mark.parametrize("name", MODELS)
def test_flop_costs_are_proportional_to_flops(corpus, name):
    size = MODELS[name]
    costs = batching.flop_costs(size, corpus, "test")
    batch = np.array([3, 1, 2])
    tokens = np.array([1560, 3600, 32760])
    expected = 4 * size.layers * size.forward_flops(batch, tokens) / batching.NOMINAL_FLOPS
    np.testing.assert_allclose(costs.quadratic.seconds(batch, tokens), expected, rtol=1e-12)
    assert 1 < costs.power.p < 2, "between linears and attention"


def test_measured_costs_are_preferred_and_their_absence_is_said(corpus):
    measured = batching.find_costs(STORE, "nvidia-h200-x2", WAN_1_3B, "fused", corpus)
    assert measured.source == "step times measured on nvidia-h200"
    assert measured.quadratic.layers == WAN_1_3B.layers
    unknown = batching.find_costs(STORE, "nvidia-h200", WAN_1_3B, "compile", corpus)
    assert unknown.source.startswith("FLOPs (no measured AdaLN 'compile'; known: eager")
    elsewhere = batching.find_costs(STORE, "abacus", WAN_14B, "eager", corpus)
    assert elsewhere.source == "FLOPs (no step times of abacus)"


def test_m_comp_is_the_baseline_s_batch_of_the_longest_bucket(corpus):
    costs = batching.find_costs(STORE, "nvidia-h200", WAN_14B, "eager", corpus)
    rule = batching.make_policy("dual_constraint", costs, corpus, BatchLimits(100_000, token_budget=48_000))
    longest = int(corpus.tokens.max())
    assert rule.m_comp == pytest.approx(48_000 // longest * longest**rule.p) and rule.p == costs.power.p
    given = batching.make_policy("dual_constraint", costs, corpus, BatchLimits(100_000, m_comp=1e9, p=1.5))
    assert (given.m_comp, given.p) == (1e9, 1.5)
    steeper = batching.make_policy("dual_constraint", costs, corpus, BatchLimits(100_000, 48_000, p=2.0))
    assert steeper.m_comp == pytest.approx(48_000 // longest * longest**2.0)


def test_modes_and_every_policy_can_be_made(corpus):
    costs = batching.flop_costs(WAN_1_3B, corpus, "test")
    for mode in MODES.values():
        rule = batching.make_policy(mode.policy, costs, corpus, BatchLimits())
        assert rule.name == mode.policy
        assert len(batching.batch_table(rule, corpus)) == np.count_nonzero(corpus.counts)


def test_limits_that_are_no_numbers_are_refused(corpus):
    for wrong in ({"p": float("nan")}, {"m_comp": float("inf")}, {"p": 0.0}):
        with pytest.raises(ValueError, match="must be positive and finite"):
            BatchLimits(100_000, **wrong)
    costs = batching.flop_costs(WAN_1_3B, corpus, "test")
    with pytest.raises(ValueError, match=r"46,800 tokens, more than a token budget of 40,000"):
        batching.make_policy("dual_constraint", costs, corpus, BatchLimits(100_000, token_budget=40_000))
    given = batching.make_policy("dual_constraint", costs, corpus, BatchLimits(100_000, 40_000, m_comp=1e9))
    assert given.m_comp == 1e9, "then nothing follows from the budget"
