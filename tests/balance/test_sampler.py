"""The batch sampler: what a DataLoader and a checkpoint see of a schedule."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from repro.balance.balanced import Balanced
from repro.balance.cost import reference_wan14b
from repro.balance.policies import EqualToken
from repro.balance.sampler import ScheduleSampler, fingerprint
from repro.balance.schedule import Layout
from repro.corpus.mixes import named
from repro.corpus.shapes import Shape

COST = reference_wan14b()
CORPUS = named("wan-uniform", samples=3_000)
LAYOUT = Layout(4, 48_000, 2)
POLICY = Balanced(48_000, COST)


def _sampler(rank: int = 0, **kwargs: object) -> ScheduleSampler:
    return ScheduleSampler(POLICY, CORPUS, LAYOUT, rank, **kwargs)  # type: ignore[arg-type]


def test_ranks_deal_the_corpus_once_between_them_without_talking() -> None:
    dealt = [list(_sampler(rank)) for rank in range(4)]
    assert len({len(batches) for batches in dealt}) == 1
    ids = sorted(i for batches in dealt for batch in batches for i in batch)
    assert ids == list(range(CORPUS.samples))


def test_weights_come_alongside() -> None:
    samplers = [_sampler(rank, weighting="batch_mean") for rank in range(4)]
    for sampler in samplers:
        for batch, micro_batch in zip(sampler, sampler.micro_batches(), strict=True):
            assert tuple(batch) == micro_batch.sample_ids
    first = [next(s.steps()) for s in samplers]
    assert sum(w for step in first for m in step for w in m.weights) == pytest.approx(1.0)


def test_epochs_differ_and_a_repeated_epoch_does_not() -> None:
    sampler = _sampler()
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_state_counts_whole_steps_and_is_small_and_plain() -> None:
    sampler = _sampler(seed=7)
    batches = iter(sampler)
    for _ in range(5):  # two whole steps of two micro-batches and half a step
        next(batches)
    state = sampler.state_dict()
    assert state["steps"] == 2
    assert len(json.dumps(state)) < 120
    resumed = _sampler()
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.set_epoch(0)  # as a training loop does at the head of an epoch; the position stays
    assert list(resumed) == list(_sampler(seed=7))[4:]
    assert list(resumed) == list(_sampler(seed=7)), "after the resumed epoch a whole one"


def test_a_loop_over_steps_is_gone_on_with_after_the_steps_that_it_took() -> None:
    whole = list(_sampler().steps())
    sampler, taken = _sampler(), []
    for stop in (2, 5):  # interrupted twice
        for step in sampler.steps():
            taken.append(step)
            state = sampler.state_dict()
            assert state["steps"] == len(taken), "of the epoch, not of this process"
            if len(taken) == stop:
                break
        assert sampler.state_dict() == state
        sampler = _sampler()
        sampler.load_state_dict(state)
    assert [*taken, *sampler.steps()] == whole
    assert sampler.state_dict()["steps"] == len(whole)


def test_iterations_side_by_side_or_one_after_the_other_do_not_add_up() -> None:
    sampler = _sampler()
    for dealt, _ in enumerate(zip(sampler.micro_batches(), sampler, sampler.micro_batches(), strict=False), 1):
        assert sampler.state_dict()["steps"] == dealt // 2
        if dealt == 7:
            break
    assert sampler.state_dict()["steps"] == 3
    assert len(list(sampler.steps())) == sampler.state_dict()["steps"] == sampler.schedule.steps
    next(iter(sampler))
    assert sampler.state_dict()["steps"] == 0
    sampler.set_epoch(1)
    next(sampler.steps())
    assert sampler.state_dict()["steps"] == 1


def test_a_state_is_refused_where_iterations_stand_at_different_steps() -> None:
    sampler = _sampler()
    ahead, taken = iter(sampler), sampler.micro_batches()  # as with workers that prefetch
    for _ in range(6):
        next(ahead)
    next(taken)
    with pytest.raises(ValueError, match=r"dealt 0 and 3 steps .* say how many are done, state_dict\(steps=...\)"):
        sampler.state_dict()
    assert sampler.state_dict(1)["steps"] == 1
    del ahead, taken
    with pytest.raises(ValueError, match="dealt 0 and 3 steps"):
        sampler.state_dict()  # after the loop was left, too
    steps = sampler.steps()
    for _ in range(2):
        next(steps)
    assert sampler.state_dict()["steps"] == 2
    next(sampler.steps())  # only looked into
    with pytest.raises(ValueError, match="dealt 1 and 2 steps"):
        sampler.state_dict()


def test_state_of_another_schedule_is_refused() -> None:
    state = _sampler().state_dict(3)
    other = ScheduleSampler(EqualToken(48_000), CORPUS, LAYOUT, 0)
    with pytest.raises(ValueError, match="resume with the same corpus, policy and layout"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"steps must be in 0\.\."):
        _sampler().state_dict(10_000)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.3, got 4"):
        _sampler(rank=4)


@pytest.mark.parametrize("wrong", [{"steps": 10**6}, {"steps": -3}, {"steps": 2.5}, {"seed": None}, {"epoch": True}])
def test_a_refused_state_changes_nothing(wrong: dict[str, object]) -> None:
    state = _sampler(seed=7).state_dict(3) | {"epoch": 0} | wrong
    sampler = _sampler(seed=5)
    sampler.set_epoch(2)
    before = sampler.state_dict(0)
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} of the state must be"):
        sampler.load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resume with the same"):
        sampler.load_state_dict(_sampler(seed=7).state_dict(3) | {"schedule": "0"})
    assert (sampler.seed, sampler.epoch) == (5, 2)
    assert sampler.state_dict(0) == before
    assert len(list(sampler)) == sampler.report().micro_batches


def test_a_state_at_the_end_of_its_epoch_is_accepted() -> None:
    steps = _sampler().schedule.steps
    sampler = _sampler()
    sampler.load_state_dict(_sampler().state_dict(steps))
    assert list(sampler) == []


def test_the_fingerprint_tells_shapes_and_tokens_apart() -> None:
    """The same numbers of samples in as many buckets, dealt alike."""
    turned = tuple(Shape(s.frames, s.width, s.height) for s in CORPUS.shapes)
    schedules = [
        EqualToken(48_000).schedule(corpus, LAYOUT)
        for corpus in (CORPUS, replace(CORPUS, shapes=turned), replace(CORPUS, tokens=CORPUS.tokens - 1))
    ]
    assert all(np.array_equal(s.batch, schedules[0].batch) for s in schedules)
    assert len({fingerprint(s) for s in schedules}) == 3


def test_report_says_what_will_be_filled_before_training() -> None:
    report = _sampler().report()
    schedule = _sampler().schedule
    assert report.samples == 3_000
    assert report.micro_batches == len(list(_sampler()))
    assert report.fillers == schedule.fillers
    sizes = 48_000 // CORPUS.tokens
    full = sum(int(((schedule.bucket == k) & (schedule.batch == b)).sum()) for k, b in enumerate(sizes))
    assert report.partial == int((schedule.batch > 0).sum()) - full
    assert report.samples_per_step[0] <= report.samples_per_step[1] <= report.samples_per_step[2]
    assert f"limit {schedule.wait_limit_steps}" in str(report)
    assert {_sampler(rank).report().fingerprint for rank in range(4)} == {report.fingerprint}
    assert _sampler(seed=1).report().fingerprint != report.fingerprint


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_made_amid_an_epoch_begins_where_its_original_did(twin: Callable[..., ScheduleSampler]) -> None:
    sampler = _sampler()
    under_way = sampler.steps()
    next(under_way), next(under_way)
    other = twin(sampler)
    assert other.state_dict()["steps"] == 0
    next(other.steps())
    assert other.state_dict()["steps"] == 1 and sampler.state_dict()["steps"] == 2


def test_a_data_loader_takes_it_as_batch_sampler() -> None:
    data = pytest.importorskip("torch.utils.data")
    sampler = _sampler()
    loader = data.DataLoader(np.arange(CORPUS.samples), batch_sampler=sampler)
    assert len(loader) == len(sampler)
    assert [batch.tolist() for batch in loader] == list(sampler)
