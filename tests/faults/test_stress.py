"""Many ranks: a short form of the run in tests/stress.csv, that run's own rows, and the sampler on 1,024 ranks."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from repro.balance import metrics
from repro.balance.balanced import Balanced
from repro.balance.cost import reference_wan14b
from repro.balance.policies import Policy
from repro.balance.sampler import ScheduleSampler
from repro.balance.schedule import Layout, Schedule
from repro.corpus.mixes import named
from repro.corpus.shapes import Corpus

MANY = 1024
CORPUS = named("wan-uniform", samples=200_000)
LAYOUT = Layout(MANY, 48_000, 2)
POLICY = Balanced(48_000, reference_wan14b())


@pytest.mark.slow
def test_eight_ranks_train_on_random_shapes(tmp_path: Path) -> None:
    """They come to the end, with one process' gradients, and keep nothing from step to step."""
    stress = pytest.importorskip("tests.faults.stress")
    assert stress.problems(stress.run(tmp_path / "rows.csv", steps=4, every=2), steps=4) == []


def test_the_committed_run_has_no_problems() -> None:
    stress = pytest.importorskip("tests.faults.stress")
    with stress.STRESS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == stress.COLUMNS
    assert stress.problems(rows, stress.STEPS) == []
    assert max(int(r["shapes"]) for r in rows) >= 3


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("gradient_error", ["1e-16", "1e-3"], "gradients differ"),
        ("gradient_error", ["0.0", "0.0"], "gradients differ"),
        ("tensors", ["100", "101"], "living tensors change"),
        ("resident_mb", ["300", "320"], "memory grows from 300 to 320 MB"),
        ("step", ["1", "2"], "did not come to step 499"),
    ],
)
def test_a_bad_run_is_told(column: str, values: list[str], told: str) -> None:
    stress = pytest.importorskip("tests.faults.stress")
    good = {"epoch": "0", "samples": "9", "shapes": "3", "gradient_error": "1e-15", "tensors": "100",
            "resident_mb": "300", "seconds": "1"}  # fmt: skip
    rows = [{**good, "sync": sync, "step": str(min(20 * i, 499))} for sync in stress.SYNCS for i in range(26)]
    assert stress.problems(rows, 500) == []
    for i, row in enumerate(rows[26:]):
        row[column] = values[i > 12]
    (found,) = stress.problems(rows, 500)
    assert found.startswith("step: ") and told in found


class Once(Policy):
    """A policy whose schedule is computed once for all ranks of this process, which would each compute the same."""

    name = "once"

    def __init__(self, policy: Policy) -> None:
        self.policy, self.known = policy, {}

    def batch_sizes(self, tokens: np.ndarray) -> np.ndarray:
        return self.policy.batch_sizes(tokens)

    def schedule(self, corpus: Corpus, layout: Layout, seed: int = 0, epoch: int = 0) -> Schedule:
        if (seed, epoch) not in self.known:
            self.known[seed, epoch] = self.policy.schedule(corpus, layout, seed, epoch)
        return self.known[seed, epoch]


def test_1024_ranks_deal_the_corpus_once_in_step() -> None:
    policy = Once(POLICY)
    samplers = [ScheduleSampler(policy, CORPUS, LAYOUT, rank, seed=3) for rank in range(MANY)]
    dealt = [list(s) for s in samplers]
    assert len({len(own) for own in dealt}) == 1, "the same micro-batches on every rank: nobody waits for ever"
    ids = np.array([i for own in dealt for batch in own for i in batch])
    fillers = samplers[0].report().fillers
    assert fillers <= MANY and len(ids) == CORPUS.samples + fillers
    assert np.array_equal(np.unique(ids), np.arange(CORPUS.samples))
    weights = np.zeros(samplers[0].schedule.steps)
    for sampler in samplers:
        for step, own in enumerate(sampler.steps()):
            weights[step] += sum(w for m in own for w in m.weights)
    assert weights == pytest.approx(np.ones_like(weights))  # 1,024 ranks' weights, added up one after the other


def test_on_1024_ranks_work_is_even_and_nobody_waits_long() -> None:
    schedule = POLICY.schedule(CORPUS, LAYOUT, seed=3)
    seconds = metrics.compute_seconds(schedule, reference_wan14b())
    slowest, mean = seconds.max(axis=2), seconds.mean(axis=2)
    body = slice(0, schedule.steps * 3 // 4)  # the tail deals what is left, as it comes
    assert mean[body].sum() / slowest[body].sum() > 0.9
    assert schedule.max_wait_steps <= schedule.wait_limit_steps
    longer = POLICY.schedule(named("wan-uniform", samples=800_000), LAYOUT, seed=3)
    assert longer.backlog_steps < 1.5 * schedule.backlog_steps, "what is carried over does not grow with the epoch"


def test_ranks_far_apart_compute_the_same_schedule_and_go_on_from_each_others_state() -> None:
    samplers = [ScheduleSampler(POLICY, CORPUS, LAYOUT, rank, seed=3) for rank in (0, 511, MANY - 1)]
    assert len({s.report().fingerprint for s in samplers}) == 1
    middle = samplers[0].schedule.steps // 2
    whole = list(samplers[2])
    samplers[2].load_state_dict(samplers[0].state_dict(middle))
    left = list(samplers[2])
    assert left == whole[-len(left) :] and 0 < len(left) < len(whole)
