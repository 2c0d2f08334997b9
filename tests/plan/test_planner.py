"""Plans are made from measured rows only, name their limits, and state their uncertainty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from repro import plan_setup, planner
from repro.balance import policies
from repro.corpus import Corpus, Shape, Tokenizer, mixes
from repro.plan_setup import Costs, PlanError, Setup
from repro.records import Store
from tests.plan.recorded import MEMORY_BYTES, milliseconds, sweep, write


def asked(ranks: int = 16, **given: object) -> Setup:
    defaults: dict[str, object] = {"device": "nvidia-h200", "memory_bytes": float(MEMORY_BYTES), "ranks": ranks}
    return Setup(model=plan_setup.known_model("wan-14b"), **{**defaults, **given})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(write(tmp_path_factory.mktemp("plan") / "results"))


@pytest.fixture(scope="module")
def costs(store: Store) -> Costs:
    return plan_setup.read_costs(store, asked())[0]


@pytest.fixture(scope="module")
def plan(costs: Costs) -> planner.Plan:
    return planner.make(asked(), costs, mixes.named("wan-uniform", 30_000), 58_896)


def test_costs_are_those_of_the_rows_at_full_depth(costs: Costs) -> None:
    """Rows carry 3% of noise, so the fit is within a few per cent of the formula behind them."""
    batch, tokens = np.array([30, 6, 1]), np.array([1_560, 7_800, 46_800])
    want = [milliseconds(int(b), int(s), 40) / 1e3 for b, s in zip(batch, tokens, strict=True)]
    assert costs.quadratic.seconds(batch, tokens) == pytest.approx(want, rel=0.05)
    assert costs.quadratic.layers == 40 and costs.quadratic.kind == "simulated"
    assert 0.5 < costs.held_out_mape < 10
    assert costs.errors.size == 12


def test_a_whole_model_s_sweep_goes_before_its_blocks(costs: Costs, tmp_path: Path) -> None:
    store = Store(sweep(write(tmp_path / "results"), slower=2.0))
    found, _ = plan_setup.read_costs(store, asked())
    batch, tokens = np.array([30, 1]), np.array([1_560, 46_800])
    assert found.quadratic.seconds(batch, tokens) == pytest.approx(2 * costs.quadratic.seconds(batch, tokens), rel=0.06)
    assert "all 40 blocks" in found.told and "scaled to 40" in costs.told


def test_memory_decides_unless_told_otherwise(store: Store) -> None:
    costs, memory = plan_setup.read_costs(store, asked())
    few, notes_few = plan_setup.token_limit(asked(ranks=4), costs, memory)
    many, _ = plan_setup.token_limit(asked(ranks=8), costs, memory)
    assert few < many <= costs.quadratic.range.micro_batch_tokens
    assert notes_few == []
    assert plan_setup.token_limit(asked(m_mem=50_000), costs, memory) == (50_000, [])


def test_what_was_not_measured_is_refused_unless_asked_for(store: Store) -> None:
    costs, memory = plan_setup.read_costs(store, asked())
    roomy = asked(ranks=64)
    limit, notes = plan_setup.token_limit(roomy, costs, memory)
    assert limit == costs.quadratic.range.micro_batch_tokens
    assert "--extrapolate" in notes[0]
    beyond, none = plan_setup.token_limit(asked(ranks=64, extrapolate=True), costs, memory)
    assert beyond > limit and none == []
    with pytest.raises(PlanError, match=r"400,000 tokens is beyond the largest micro-batch measured"):
        plan_setup.token_limit(asked(m_mem=400_000), costs, memory)
    assert plan_setup.token_limit(asked(m_mem=400_000, extrapolate=True), costs, memory)[0] == 400_000


def test_a_model_that_does_not_fit_and_unmeasured_memory(store: Store, tmp_path: Path) -> None:
    costs, memory = plan_setup.read_costs(store, asked())
    with pytest.raises(PlanError, match="use more ranks"):
        plan_setup.token_limit(asked(ranks=1), costs, memory)
    bare = Store(write(tmp_path / "results", memory=False))
    costs, memory = plan_setup.read_costs(bare, asked())
    assert memory is None
    with pytest.raises(PlanError, match="give --m-mem"):
        plan_setup.token_limit(asked(), costs, memory)


def test_rows_of_another_model_or_adaln_are_not_borrowed(store: Store) -> None:
    with pytest.raises(PlanError, match=r"wan-1\.3b"):
        plan_setup.read_costs(store, Setup(plan_setup.known_model("wan-1.3b"), "nvidia-h200", 1e11, 8))
    with pytest.raises(PlanError, match="fused"):
        plan_setup.read_costs(store, asked(adaln="fused"))
    with pytest.raises(PlanError, match="measured: nvidia-h200"):
        plan_setup.require_measured(store, "nvidia-h100")
    assert plan_setup.recorded_memory(store, "nvidia-h200") == MEMORY_BYTES
    assert plan_setup.recorded_memory(store, "nvidia-h100") is None


def test_batches_follow_the_rules_and_the_memory_limit(plan: planner.Plan) -> None:
    tokens = plan.corpus.tokens
    assert plan.buckets["equal_token"].batch.tolist() == (58_896 // tokens).tolist()
    rule = np.minimum(58_896 // tokens, np.floor(plan.limits.m_comp / tokens**plan.limits.p * (1 + 1e-9)))
    assert plan.buckets["dual_constraint"].batch.tolist() == np.maximum(1, rule).tolist()
    for b in plan.buckets.values():
        assert np.all(b.batch >= 1) and np.all(b.batch * tokens <= 58_896)
        assert b.seconds == pytest.approx(plan.costs.quadratic.seconds(b.batch, tokens))
    assert set(plan.buckets) == set(policies.NAMES)


def test_pinned_names_what_pins(costs: Costs) -> None:
    """Two clips of 28,476 tokens fit into 58,896, but cost more together than one of 46,800 under a power law."""
    shapes = (Shape(33, 480, 832), Shape(449, 192, 336), Shape(49, 720, 1280))
    tokens = np.array([Tokenizer().tokens(s) for s in shapes])
    corpus = Corpus("three", "test", shapes, tokens, np.repeat(np.arange(3, dtype=np.int32), 50))
    plan = planner.make(asked(ranks=2), costs, corpus, 58_896)
    assert plan.pinned == ["", "compute", "memory"]
    assert plan.buckets["dual_constraint"].batch.tolist()[1:] == [1, 1]
    assert plan.buckets["equal_token"].batch[1] == 2


def test_gains_are_paired_with_the_baseline_and_have_intervals(plan: planner.Plan) -> None:
    gains = {g.policy: g for g in plan.gains}
    assert gains["equal_token"].gain == gains["equal_token"].low == gains["equal_token"].high == 0
    for g in plan.gains:
        assert g.low <= g.gain <= g.high
        assert 0 < g.share_of_perfect <= 1
        assert g.gain == pytest.approx(g.samples_per_s / gains["equal_token"].samples_per_s - 1)
    best = gains["balanced"]
    assert best.gain > 0.3 and best.low > 0.2
    assert best.high - best.low > 0.005, "held-out errors of a few per cent must show in the interval"
    assert plan.best_table() not in ("balanced", "longest_first")


def test_a_worse_cost_model_widens_the_interval(tmp_path: Path) -> None:
    widths = []
    for noise in (0.01, 0.2):
        noisy = Store(write(tmp_path / f"{noise}" / "results", noise=noise))
        costs, _ = plan_setup.read_costs(noisy, asked())
        gains = planner.make(asked(), costs, mixes.named("wan-uniform", 20_000), 58_896).gains
        balanced = next(g for g in gains if g.policy == "balanced")
        widths.append(balanced.high - balanced.low)
    assert widths[1] > 3 * widths[0]


def test_the_same_plan_again(costs: Costs, plan: planner.Plan) -> None:
    again = planner.make(asked(), costs, mixes.named("wan-uniform", 30_000), 58_896)
    assert again.gains == plan.gains


def test_a_smaller_baseline_makes_the_freed_memory_part_of_the_gain(costs: Costs, plan: planner.Plan) -> None:
    smaller = planner.make(asked(token_budget=48_000), costs, mixes.named("wan-uniform", 30_000), 58_896)
    assert smaller.buckets["equal_token"].batch.tolist() == np.maximum(1, 48_000 // plan.corpus.tokens).tolist()
    assert smaller.buckets["dual_constraint"].batch.tolist() == plan.buckets["dual_constraint"].batch.tolist()
    full, freed = (next(g.gain for g in p.gains if g.policy == "dual_constraint") for p in (plan, smaller))
    assert freed > full + 0.02
    with pytest.raises(PlanError, match="token budget must be 1 to M_mem = 58,896"):
        planner.make(asked(token_budget=60_000), costs, mixes.named("wan-uniform", 1_000), 58_896)


def test_empty_buckets_do_not_count(costs: Costs) -> None:
    corpus = mixes.named("wan-uniform", 30_000)
    emptied = Corpus(
        "holes", "test", corpus.shapes, corpus.tokens, corpus.bucket_of[np.isin(corpus.bucket_of, (0, 2, 6))]
    )
    plan = planner.make(asked(), costs, emptied, 58_896)
    assert plan.corpus.shapes == tuple(corpus.shapes[k] for k in (0, 2, 6))
    assert plan.corpus.samples == emptied.samples
    assert plan.corpus.counts.tolist() == emptied.counts[[0, 2, 6]].tolist()


def test_clips_that_fit_nowhere_are_named(costs: Costs) -> None:
    corpus = mixes.named("wan-uniform", 5_000)
    sample = int(np.argmax(corpus.bucket_of == 9))
    with pytest.raises(
        PlanError, match=f"sample {sample} of wan-uniform is 49x720x1280, 46,800 tokens, more than the memory"
    ):
        planner.make(asked(), costs, corpus, 40_000)
    long = Corpus("long", "test", (Shape(161, 720, 1280),), np.array([147_600]), np.zeros(50, dtype=np.int32))
    with pytest.raises(PlanError, match="the longest measured on nvidia-h200 is 75,600"):
        planner.make(asked(), costs, long, 150_000)
    plan = planner.make(asked(extrapolate=True), costs, long, 150_000)
    assert "161x720x1280 are extrapolated" in plan.warnings[0]


def test_short_sequences_below_the_sweep_are_planned_with_a_warning(costs: Costs) -> None:
    corpus = Corpus("tiny", "test", (Shape(1, 192, 336),), np.array([252]), np.zeros(500, dtype=np.int32))
    assert (
        "1x192x336 are extrapolated: measured were 256 to" in planner.make(asked(), costs, corpus, 58_896).warnings[0]
    )


def test_fewer_clips_than_ranks_and_a_single_bucket(costs: Costs) -> None:
    corpus = Corpus("few", "test", (Shape(81, 480, 832),), np.array([32_760]), np.zeros(3, dtype=np.int32))
    plan = planner.make(asked(ranks=16), costs, corpus, 58_896)
    assert plan.simulated_samples == 3
    assert all(g.share_of_perfect <= 3 / 16 + 1e-9 for g in plan.gains)


def test_slow_communication_lowers_throughput(costs: Costs) -> None:
    corpus = mixes.named("wan-uniform", 20_000)
    free, slow = (planner.make(asked(bandwidth=b), costs, corpus, 58_896).gains[0].samples_per_s for b in (None, 5e9))
    assert slow < free


@pytest.mark.parametrize("wrong", [{"ranks": 0}, {"micro_batches": 0}, {"memory_bytes": 0.0}, {"m_mem": 10}])
def test_impossible_setups(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=r"must be (from 1 to|at least)"):
        asked(**wrong)  # type: ignore[arg-type]


def test_unknown_model() -> None:
    with pytest.raises(PlanError, match=r"no model 'wan'; nearest: wan-1"):
        plan_setup.known_model("wan")
