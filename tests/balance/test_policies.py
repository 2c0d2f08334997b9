"""Batch sizes and dealings of the ready-made policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from repro.balance import policies
from repro.balance.cost import reference_wan14b
from repro.balance.policies import (
    DualConstraint,
    DualConstraintSameBucket,
    EqualTime,
    EqualToken,
    EqualTokenSameBucket,
    LongestFirst,
    Policy,
    QuadraticBudget,
)
from repro.balance.schedule import ABSENT, Layout
from repro.balance.simulate import simulate
from repro.corpus.mixes import named
from repro.corpus.shapes import Corpus, Shape

COST = reference_wan14b()
CORPUS = named("wan-uniform", samples=6_000)
READY_MADE: list[Policy] = [
    EqualToken(48_000),
    EqualTokenSameBucket(48_000),
    DualConstraint(48_000, m_comp=4e5, p=1.2),
    DualConstraintSameBucket(48_000, m_comp=4e5, p=1.2),
    QuadraticBudget(48_000, quadratic=26_700),
    EqualTime(48_000, COST, target=12.5),
    LongestFirst(48_000, COST),
]


def test_batch_sizes_follow_each_rule() -> None:
    tokens = np.array([1_560, 20_280, 46_800])
    assert EqualToken(48_000).batch_sizes(tokens).tolist() == [30, 2, 1]
    # The compute bound alone: 46,800 gets exactly one, shorter ones (46,800 / S)^2 less rounding.
    rule = DualConstraint(m_mem=10**9, m_comp=46_800.0**2, p=2.0)
    assert rule.batch_sizes(tokens).tolist() == [900, 5, 1]
    # Both bounds: memory binds the images, compute the clips.
    assert DualConstraint(m_mem=48_000, m_comp=20_280.0**1.2, p=1.2).batch_sizes(tokens).tolist() == [21, 1, 1]
    assert DualConstraint(48_000, 1e30, 1.0).batch_sizes([256, 48_000]).tolist() == [187, 1], "compute never binds"
    # S + S^2 / Q with Q = S doubles the length.
    assert QuadraticBudget(48_000, quadratic=1_560).batch_sizes([1_560]).tolist() == [15]
    assert QuadraticBudget(48_000, quadratic=1e12).batch_sizes(tokens).tolist() == [30, 2, 1]


def test_equal_time_takes_the_largest_batch_within_time_and_memory() -> None:
    tokens = CORPUS.tokens
    sizes = EqualTime(48_000, COST, target=9.0).batch_sizes(tokens)
    allowed = 48_000 // tokens
    assert np.all((COST.seconds(sizes, tokens) <= 9.0) | (sizes == 1))
    assert np.all((COST.seconds(np.minimum(sizes + 1, allowed), tokens) > 9.0) | (sizes == allowed))
    # Without a target the longest bucket sets it.
    assert EqualTime(70_000, COST).batch_sizes([1_560, 32_760])[1] == 1


@dataclass(frozen=True)
class Tenths:
    """A tenth of a second for every thousand tokens."""

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return np.asarray(batch) * (0.1 * np.asarray(tokens) / 1_000)


def test_equal_time_takes_what_reaches_the_target_exactly() -> None:
    assert 3 * 0.1 > 0.3
    tokens = np.array([1_000, 3_000])
    assert EqualTime(10_000, Tenths(), target=0.3).batch_sizes(tokens).tolist() == [3, 1]
    assert EqualTime(10_000, Tenths()).batch_sizes(tokens).tolist() == [3, 1], "the longest bucket's one sample"
    assert EqualTime(10_000, Tenths(), target=0.29).batch_sizes(tokens).tolist() == [2, 1]
    assert EqualTime(10_000, Tenths(), target=9.0).batch_sizes(tokens).tolist() == [10, 3], "memory binds"


@pytest.mark.parametrize("policy", READY_MADE, ids=lambda p: p.name)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_matched_gives_the_references_samples_a_step(policy: Policy, micro_batches: int) -> None:
    corpus = named("wan-uniform", samples=60_000)
    schedule = policy.schedule(corpus, Layout(4, 48_000, micro_batches), seed=3)
    wanted = 6 * 4 * micro_batches  # 48,000 tokens hold six samples on average in this corpus
    assert corpus.samples / schedule.steps == pytest.approx(wanted, rel=0.01)


def test_as_published_is_one_micro_batch_a_step() -> None:
    schedule = READY_MADE[4].schedule(CORPUS, Layout(4, 48_000, protocol="as_published"))
    assert schedule.bucket.shape[1] == 1
    with pytest.raises(ValueError, match="one micro-batch a step"):
        Layout(4, 48_000, micro_batches=2, protocol="as_published")


@pytest.mark.parametrize("policy", [p for p in READY_MADE if "same_bucket" in p.name or p.name == "quadratic_budget"])
def test_same_bucket_fills_slots_with_one_bucket_until_the_tail(policy: Policy) -> None:
    schedule = policy.schedule(CORPUS, Layout(8, 48_000))
    slots = schedule.bucket.reshape(-1, 8)
    mixed = np.flatnonzero((slots != slots[:, :1]).any(axis=1))
    # Ten buckets leave at most seven micro-batches each, that is nine slots at the end.
    assert mixed.min() >= len(slots) - 9


@pytest.mark.parametrize("policy", READY_MADE, ids=lambda p: p.name)
def test_seed_and_epoch_draw_anew(policy: Policy) -> None:
    layout = Layout(4, 48_000)
    first = policy.schedule(CORPUS, layout, seed=1)
    assert np.array_equal(first.bucket, policy.schedule(CORPUS, layout, seed=1).bucket)
    for other in (policy.schedule(CORPUS, layout, seed=2), policy.schedule(CORPUS, layout, seed=1, epoch=1)):
        assert not np.array_equal(first.bucket, other.bucket)


def test_fillers_are_at_the_tail_only() -> None:
    for policy in READY_MADE:
        schedule = policy.schedule(CORPUS, Layout(8, 48_000, micro_batches=2))
        filler = (schedule.batch == 0) & (schedule.bucket != ABSENT)
        assert schedule.fillers < 8
        assert not filler[:-1].any()


def test_longest_first_beats_drawing_at_random_where_ranks_meet_often_or_once() -> None:
    for sync in ("step", "micro_batch"):
        layout = Layout(8, 48_000, 8, sync)
        drawn = simulate(EqualToken(48_000).schedule(CORPUS, layout), COST, layout)
        dealt = simulate(LongestFirst(48_000, COST).schedule(CORPUS, layout), COST, layout)
        assert dealt.samples_per_s > 1.1 * drawn.samples_per_s
        assert dealt.mix_distance == pytest.approx(drawn.mix_distance)


def test_errors_name_the_value_and_the_fix() -> None:
    with pytest.raises(ValueError, match=r"sample \d+ \(49x720x1280, 46800 tokens\) exceeds the memory limit of 40000"):
        EqualToken(40_000).schedule(CORPUS, Layout(2, 40_000))
    with pytest.raises(ValueError, match="equal_token puts 41 samples"):
        EqualToken(64_000).schedule(CORPUS, Layout(2, 48_000))
    empty = Corpus("none", "", (Shape(1, 480, 832),), np.array([1_560]), np.array([], dtype=np.int32))
    with pytest.raises(ValueError, match="corpus none has no samples"):
        EqualToken(48_000).schedule(empty, Layout(2, 48_000))


def test_make_builds_every_policy_by_name() -> None:
    for name in policies.NAMES:
        made = policies.make(name, m_mem=58_896, cost=COST, token_budget=48_000, m_comp=4e5, p=1.2, quadratic=26_700)
        assert made.name == name
    with pytest.raises(KeyError, match="no policy 'longest_last'; nearest: longest_first"):
        policies.make("longest_last", m_mem=1, cost=COST)
    with pytest.raises(ValueError, match="dual_constraint needs m_comp and p"):
        policies.make("dual_constraint", m_mem=48_000, cost=COST)


@pytest.mark.parametrize("name", policies.NAMES)
@pytest.mark.parametrize("m_mem", [-1, 0, 48_000.5, np.nan])
def test_a_memory_limit_is_a_whole_number_of_tokens(name: str, m_mem: float) -> None:
    with pytest.raises(ValueError, match=f"(m_mem|budget) must be at least 1 and whole, got {m_mem}"):
        policies.make(name, m_mem=m_mem, cost=COST, m_comp=4e5, p=1.2, quadratic=26_700)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["equal_time", "longest_first", "balanced"])
@pytest.mark.parametrize("cost", [None, 3.0, "quadratic"])
def test_a_cost_tells_seconds(name: str, cost: object) -> None:
    with pytest.raises(TypeError, match=r"cost must tell seconds\(batch, tokens\), .* got " + repr(cost)):
        policies.make(name, m_mem=48_000, cost=cost)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1.0, 0.0, np.nan])
def test_other_values_are_positive(value: float) -> None:
    with pytest.raises(ValueError, match=f"quadratic must be positive, got {value}"):
        QuadraticBudget(48_000, quadratic=value)
    with pytest.raises(ValueError, match=f"target must be positive and finite, got {value}"):
        EqualTime(48_000, COST, target=value)
    assert QuadraticBudget(48_000, quadratic=np.inf).batch_sizes([1_000]).tolist() == [48]
