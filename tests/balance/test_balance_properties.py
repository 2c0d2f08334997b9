"""What every schedule must keep, whatever the corpus, policy, ranks and seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.balanced import Balanced
from repro.balance.cost import reference_wan14b
from repro.balance.policies import (
    DualConstraint,
    EqualTime,
    EqualToken,
    EqualTokenSameBucket,
    LongestFirst,
    Policy,
    QuadraticBudget,
)
from repro.balance.sampler import ScheduleSampler
from repro.balance.schedule import ABSENT, Layout, shuffled
from repro.balance.simulate import simulate
from repro.corpus.shapes import Corpus, Shape, Tokenizer

COST = reference_wan14b()
M_MEM = 48_000
SHAPES = tuple(Shape(f, h, w) for f in (1, 17, 33, 49) for h, w in ((256, 256), (480, 832), (720, 1280)))
TOKENS = np.array([Tokenizer().tokens(s) for s in SHAPES])
POLICIES: list[Policy] = [
    EqualToken(M_MEM),
    EqualTokenSameBucket(M_MEM),
    DualConstraint(M_MEM, m_comp=4e5, p=1.2),
    QuadraticBudget(M_MEM, quadratic=26_700),
    EqualTime(M_MEM, COST, target=12.5),
    LongestFirst(M_MEM, COST),
    Balanced(M_MEM, COST),
]
SETTINGS = settings(max_examples=25, derandomize=True, deadline=None)


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    """A few buckets of very different sizes, empty ones too, in a mixed order."""
    used = draw(st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=6, unique=True))
    counts = [draw(st.sampled_from([0, 1, 2, 7, 40, 300])) for _ in used]
    counts[0] = max(1, counts[0])
    buckets = np.repeat(np.arange(len(used)), counts)
    buckets = np.random.default_rng(draw(st.integers(0, 99))).permutation(buckets)
    return Corpus("random", "", tuple(SHAPES[u] for u in used), TOKENS[used], buckets.astype(np.int32))


layouts = st.builds(
    Layout,
    ranks=st.sampled_from([1, 2, 3, 8, 17]),
    m_mem=st.just(M_MEM),
    micro_batches=st.integers(1, 5),
    sync=st.sampled_from(["step", "micro_batch"]),
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@given(corpus=corpora(), layout=layouts, seed=st.integers(0, 9))
@SETTINGS
def test_steps_keep_the_contract(policy: Policy, corpus: Corpus, layout: Layout, seed: int) -> None:
    schedule = policy.schedule(corpus, layout, seed)
    seen: list[int] = []
    for number, step in enumerate(schedule):
        assert len(step.ranks) == layout.ranks
        assert {len(rank) for rank in step.ranks} == {int(schedule.slots_of_step[number])}
        micro_batches = [m for rank in step.ranks for m in rank]
        real = [m for m in micro_batches if any(m.weights)]
        assert len(real) == len(micro_batches) or number == schedule.steps - 1, "a filler before the last step"
        assert sum(w for m in real for w in m.weights) == pytest.approx(1.0)
        assert len({w for m in real for w in m.weights}) == 1
        for micro_batch in micro_batches:
            assert len(micro_batch.sample_ids) * Tokenizer().tokens(micro_batch.shape) <= M_MEM
            assert {corpus.shapes[corpus.bucket_of[i]] for i in micro_batch.sample_ids} == {micro_batch.shape}
        seen += [i for m in real for i in m.sample_ids]
    assert sorted(seen) == list(range(corpus.samples))
    assert simulate(schedule, COST, layout).share_of_perfect <= 1.0


@given(
    corpus=corpora(),
    layout=layouts,
    seed=st.integers(0, 9),
    backlog=st.sampled_from([None, 0.0, 0.5, 2.0]),
)
@SETTINGS
def test_no_sample_waits_beyond_the_limit(corpus: Corpus, layout: Layout, seed: int, backlog: float | None) -> None:
    schedule = Balanced(M_MEM, COST, backlog_steps=backlog).schedule(corpus, layout, seed)
    assert schedule.max_wait_steps <= schedule.wait_limit_steps
    # A lower bound on waiting that needs nothing but the order: whoever is used in a step was drawn by then, and by
    # then at least all that was used so far had been drawn.
    drawn, _ = shuffled(corpus, seed, 0)
    place = np.empty_like(drawn)
    place[drawn] = np.arange(drawn.size)
    used = np.cumsum(schedule.samples_of_step)
    step_of = np.repeat(np.arange(schedule.steps), schedule.samples_of_step)
    ids = [i for step in schedule for rank in step.ranks for m in rank if any(m.weights) for i in m.sample_ids]
    drawn_by = np.searchsorted(used, place[ids], side="right")  # the latest step in which it can have been drawn
    assert (step_of - drawn_by).max() <= schedule.wait_limit_steps


@given(corpus=corpora(), layout=layouts, policy=st.sampled_from(POLICIES), data=st.data())
@SETTINGS
def test_a_resumed_sampler_deals_what_is_left(
    corpus: Corpus, layout: Layout, policy: Policy, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, layout.ranks - 1))
    sampler = ScheduleSampler(policy, corpus, layout, rank, seed=3)
    sampler.set_epoch(2)
    whole = list(sampler)
    steps = data.draw(st.integers(0, sampler.schedule.steps))
    resumed = ScheduleSampler(policy, corpus, layout, rank)
    resumed.load_state_dict(sampler.state_dict(steps))
    done = int(sampler.schedule.slots_of_step[:steps].sum())
    assert len(resumed) == len(whole) - done
    assert list(resumed) == whole[done:]


@given(corpus=corpora(), layout=layouts, seed=st.integers(0, 99))
@SETTINGS
def test_seed_and_epoch_alone_decide(corpus: Corpus, layout: Layout, seed: int) -> None:
    policy = Balanced(M_MEM, COST)
    one, two = policy.schedule(corpus, layout, seed, 1), policy.schedule(corpus, layout, seed, 1)
    assert np.array_equal(one.bucket, two.bucket)
    assert np.array_equal(one.batch, two.batch)
    assert np.array_equal(one.order, two.order)
    assert np.all((one.bucket == ABSENT) <= (one.batch == 0))
