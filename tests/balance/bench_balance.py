"""Speed of planning, assigning and simulating (`pytest --benchmark-only tests/balance/bench_balance.py`).

Bars, on two cores: one step of 16,384 samples assigned to 1,024 ranks within 50 ms; 16 ranks x 10,000 steps planned
and simulated within 5 s; asserted under --benchmark-only.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from repro.balance import window
from repro.balance.balanced import Balanced
from repro.balance.cost import reference_wan14b
from repro.balance.packing import Buckets
from repro.balance.policies import EqualToken, LongestFirst, Policy
from repro.balance.schedule import Layout
from repro.balance.simulate import simulate
from repro.corpus.mixes import named

COST = reference_wan14b()
M_MEM = 48_000
ASSIGN_SECONDS = 0.05
SIMULATE_SECONDS = 5.0

RequireWithin = Callable[[BenchmarkFixture, float], None]


def test_assign_a_step_of_16384_samples_to_1024_ranks(
    benchmark: BenchmarkFixture, require_within: RequireWithin
) -> None:
    corpus = named("wan-uniform", samples=200_000)
    dearest_first = np.argsort(-COST.seconds(M_MEM // corpus.tokens, corpus.tokens))
    tokens, counts = corpus.tokens[dearest_first], corpus.counts[dearest_first]
    buckets = Buckets(tokens, M_MEM // tokens, COST)
    layout = Layout(1_024, M_MEM, micro_batches=3)  # 3,072 micro-batches, 18,432 samples on average
    share = counts / counts.sum()
    queue = (2 * 18_432 * share).astype(np.int64)
    due = 18_432 * share / buckets.batch
    rules = window.Rules(np.array([0, 1, 4, 7]), layout.micro_batches, layout.ranks, np.zeros(10), patience=10)
    group = np.repeat(np.arange(4), [1, 3, 3, 3])

    def assign() -> int:
        number = window.step(queue, buckets.batch, due, np.zeros_like(queue), rules, group)
        assert number is not None
        bucket, batch = buckets.deal(number[None], (number * buckets.batch)[None], layout)
        assert bucket.shape == (1, 3, 1_024)
        return int(batch.sum())

    assert benchmark.pedantic(assign, rounds=5, warmup_rounds=1) >= 16_384
    require_within(benchmark, ASSIGN_SECONDS)


@pytest.mark.parametrize(
    "policy", [EqualToken(M_MEM), LongestFirst(M_MEM, COST), Balanced(M_MEM, COST)], ids=lambda p: p.name
)
def test_plan_and_simulate_16_ranks_for_10000_steps(
    benchmark: BenchmarkFixture, require_within: RequireWithin, policy: Policy
) -> None:
    corpus, layout = named("wan-uniform", samples=960_000), Layout(16, M_MEM)
    benchmark.extra_info["steps"] = 10_000

    def epoch() -> int:
        return int(simulate(policy.schedule(corpus, layout), COST, layout).step_seconds.size)

    assert benchmark.pedantic(epoch, rounds=1) == pytest.approx(10_000, abs=10)
    require_within(benchmark, SIMULATE_SECONDS)


def test_plan_a_million_samples_for_64_ranks(benchmark: BenchmarkFixture) -> None:
    corpus, layout = named("wan-uniform", samples=1_000_000), Layout(64, M_MEM, 8)
    schedule = benchmark.pedantic(Balanced(M_MEM, COST).schedule, args=(corpus, layout), rounds=1)
    assert schedule.samples_of_step.sum() == 1_000_000
