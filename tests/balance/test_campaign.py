"""Settings, the costs and policies that they get, and what is paired, on rows filled from the reference cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from repro.balance import assumptions, metrics, policies
from repro.balance.campaign import Amortised, Campaign, Effort, Setting, campaign
from repro.balance.cost import ExtrapolationError, reference_wan14b
from repro.balance.memory import state_bytes
from repro.balance.models import WAN_14B
from repro.balance.simulate import simulate
from repro.corpus import mixes
from tests.suites.test_cost_model import block_time_rows

QUICK = Effort(seeds=3, steps=30, micro_batches=600, fewest=20)
BASE = Setting("dual_constraint", "eager", 8)


@pytest.fixture(scope="module")
def rows():
    return block_time_rows()


@pytest.fixture(scope="module")
def found(rows):
    return Campaign(rows, QUICK)


@pytest.mark.parametrize("policy", policies.NAMES)
def test_settings_survive_a_row(policy):
    setting = Setting(policy, "fused", 16, "images", "wan-1.3b", "step", 4, "matched", 40_000, 50_000)
    setting = replace(setting, m_comp=1.5) if policy.startswith("dual") else setting
    assert Setting.of(setting.key) == setting
    assert (setting.key["m_comp"] == "") == (not policy.startswith("dual"))


def test_memory_rise_is_the_papers():
    assert assumptions.M_MEM == 58_896
    assert (BASE.m_mem, BASE.token_budget, BASE.corpus, BASE.protocol) == (
        58_896,
        48_000,
        "wan-uniform",
        "as_published",
    )
    assert all(a.open and a.choice and a.reason for a in assumptions.ASSUMPTIONS)


def test_a_run_is_the_simulators(found):
    outcome = found.run(BASE)
    corpus = found._corpus(BASE)
    schedule = found.policy(BASE).schedule(corpus, BASE.layout, seed=1)
    direct = simulate(schedule, found.cost("wan-14b", "eager", BASE.m_mem), BASE.layout)
    # Communication hides under compute: the smallest micro-batch takes seconds, the collectives of 14B half a second.
    assert outcome.values["tokens_per_s"][1] == pytest.approx(direct.tokens_per_s)
    assert outcome.values["mix_distance"][1] == pytest.approx(direct.mix_distance)
    load = schedule.batch[:, 0] * corpus.tokens[schedule.bucket[:, 0]].astype(float) ** 2
    assert outcome.values["load_cv"][1] == pytest.approx((load.std(axis=1) / load.mean(axis=1)).mean())
    assert outcome.source == "r1"
    assert outcome.values["tokens_per_s_p5"].max() < outcome.values["tokens_per_s"].min()


@pytest.mark.parametrize(("sync", "bytes_a_parameter"), [("micro_batch", 2 + 2 + 4), ("step", 2 + 4)])
def test_steps_of_little_work_take_what_their_collectives_take(rows, sync, bytes_a_parameter):
    """bf16 parameters gathered for each pass, or once a step; fp32 gradients reduced; a ring moves 7/8 of the bytes."""
    quick = rows.assign(value=rows["value"].where(rows["metric"] != "forward_backward", 1e-6 * rows["value"]))
    own, setting = Campaign(quick, QUICK), replace(BASE, sync=sync)
    corpus = own._corpus(setting)
    steps = own.policy(setting).schedule(corpus, setting.layout, seed=1).steps
    seconds = 7 / 8 * bytes_a_parameter * WAN_14B.parameters / assumptions.BUS_BANDWIDTH
    rate = (corpus.counts * corpus.tokens).sum() / (steps * seconds)
    assert own.run(setting).values["tokens_per_s"][1] == pytest.approx(rate)


def test_ratios_are_paired(found):
    baseline = BASE.baseline()
    assert (baseline.policy, baseline.adaln, baseline.ranks) == ("equal_token", "eager", 8)
    assert np.array_equal(found.paired(baseline, baseline, "tokens_per_s"), np.ones(QUICK.seeds))
    fused = found.paired(replace(baseline, adaln="fused"), baseline, "tokens_per_s")
    # The fixture's fused AdaLN takes 3% of 4 us a token and block off: the same on every seed, as batches are equal.
    assert np.all(fused > 1.005)
    assert np.ptp(fused) < 0.005
    drawn = found.run(baseline).values["tokens_per_s"]
    assert np.ptp(drawn) / drawn.mean() > np.ptp(fused)


def test_the_longest_buckets_baseline_batch_sets_the_pace(found):
    tokens = mixes.named("wan-uniform", 1).tokens
    longest = int(tokens.argmax())
    rule = found.policy(replace(BASE, m_mem=2 * 48_000))
    sizes = rule.batch_sizes(tokens)
    assert sizes[longest] == 1  # memory would take two
    assert np.all(sizes * tokens.astype(float) ** rule.p <= tokens[longest] ** rule.p * (1 + 1e-6))
    assert sizes.sum() > found.policy(BASE).batch_sizes(tokens).sum()
    loose = found.policy(replace(BASE, m_comp=3.0)).batch_sizes(tokens)
    assert np.array_equal(loose, np.maximum(1, BASE.m_mem // tokens))

    cost = found.cost("wan-14b", "eager", BASE.m_mem)
    timed = found.policy(replace(BASE, policy="equal_time", m_mem=2 * 48_000)).batch_sizes(tokens)
    assert np.all(cost.seconds(timed, tokens) <= cost.seconds(1, tokens[longest]) * (1 + 1e-6))
    # Many images to the longest bucket: its baseline batch, not one of them, is the pace.
    images = mixes.named("images", 1).tokens
    sizes = found.policy(replace(BASE, corpus="images")).batch_sizes(images)
    assert sizes[images.argmax()] == 48_000 // images.max()


@dataclass(frozen=True)
class Bumpy:
    """Every third batch size is dearer a sample than its neighbours."""

    def seconds(self, batch, tokens):
        b = np.asarray(batch, float)
        return b * np.asarray(tokens) * np.where(b % 3 == 0, 1.1, 1.0)


def test_smaller_batches_are_never_cheaper_a_sample():
    cost = Amortised(Bumpy(), m_mem=7 * 50)
    sizes = np.arange(1, 51)
    seconds = cost.seconds(sizes, 7)
    assert np.all(np.diff(seconds / sizes) <= 1e-12)
    assert np.all(seconds >= Bumpy().seconds(sizes, 7))
    assert seconds[-2:].tolist() == [49 * 7, 50 * 7]  # after the last dear batch size nothing changes
    assert cost.raised(sizes, 7) == pytest.approx(0.1)
    # Broadcast, in any order of lengths; beyond the memory limit as measured.
    assert cost.seconds([[2], [60]], [9, 7]) == pytest.approx(np.array([[2 * 9.9, 2 * 7.7], [60 * 9.9, 60 * 7.7]]))
    smooth = Amortised(reference_wan14b(), m_mem=48_000)
    assert smooth.raised([1, 2, 30], [1_560, 1_560, 1_560]) == 0.0
    with pytest.raises(ExtrapolationError):
        smooth.seconds(100, 46_800)


def test_scatter_of_the_table_never_beats_perfect_balance(rows):
    noisy = rows.copy()
    at = noisy["metric"] == "forward_backward"
    noisy.loc[at, "value"] *= np.exp(0.02 * np.random.default_rng(0).standard_normal(at.sum()))
    own = Campaign(noisy, QUICK)
    for policy in ("equal_token_same_bucket", "quadratic_budget", "dual_constraint_same_bucket"):
        values = own.run(replace(BASE, policy=policy)).values  # raises where the share passes 1
        assert values["share_of_perfect"].max() <= 1
        assert 0 < values["cost_raised"].max() < 8


def test_memory_is_state_and_activations(found, rows):
    peaks = {r: found.run(replace(BASE, ranks=r)).values["peak_memory"].mean() for r in (8, 16)}
    state = (state_bytes(WAN_14B, 8, "micro_batch") - state_bytes(WAN_14B, 16, "micro_batch")) / 1e9
    # Means over other draws of the same mix: activations differ by well under one GB.
    assert peaks[8] - peaks[16] == pytest.approx(state, abs=0.5)
    baseline = found.run(BASE.baseline()).values["peak_memory"].mean()
    assert baseline < peaks[8]
    times = rows[rows["metric"] == "forward_backward"]
    assert "peak_memory" not in Campaign(times, QUICK).run(BASE).values


def test_same_bucket_has_no_imbalance_across_ranks(found):
    drawn = found.run(BASE.baseline()).values
    same = found.run(replace(BASE.baseline(), policy="equal_token_same_bucket")).values
    assert drawn["load_cv"].min() > 0.5
    assert same["load_cv"].max() < 0.1
    assert set(metrics.UNITS) <= set(drawn)


def test_matched_settings_use_the_memory_limit_as_budget(found):
    setting = replace(BASE, protocol="matched", micro_batches=2, m_mem=48_000)
    samples = {p: found._corpus(replace(setting, policy=p)).samples for p in policies.NAMES}
    assert len(set(samples.values())) == 1
    assert samples["balanced"] == pytest.approx(8 * 2 * 30 * 6, rel=0.05)  # six samples a micro-batch, 30 steps


def test_load_meets_where_the_ranks_do(found):
    setting = replace(BASE, policy="equal_token", protocol="matched", sync="step", micro_batches=4, m_mem=48_000)
    corpus = found._corpus(setting)
    schedule = found.policy(setting).schedule(corpus, setting.layout, seed=2)
    load = (schedule.batch * corpus.tokens[schedule.bucket].astype(float) ** 2).sum(axis=1)
    once = found.run(setting).values["load_cv"][2]
    assert once == pytest.approx((load.std(axis=1) / load.mean(axis=1)).mean())
    # Sums of four differ by half of what one does.
    assert once < 0.7 * found.run(replace(setting, sync="micro_batch")).values["load_cv"][2]


def test_matched_policies_agree_on_samples_a_step(rows):
    # quadratic_budget cuts micro-batches of its own sizes: a few of them over make one more step.
    own = Campaign(rows)
    setting = replace(BASE, ranks=64, protocol="matched", micro_batches=8, m_mem=48_000)
    corpus = own._corpus(setting)
    steps = {
        p: own.policy(at).schedule(corpus, at.layout, seed=0).steps
        for p in ("equal_token", "quadratic_budget", "dual_constraint_same_bucket")
        for at in [replace(setting, policy=p)]
    }
    assert steps["equal_token"] > 100
    assert [steps["equal_token"] / n for n in steps.values()] == pytest.approx([1, 1, 1], abs=0.01)


def test_campaigns_follow_their_rows(rows):
    first = campaign(rows, QUICK)
    assert campaign(rows.copy(), QUICK) is first
    changed = rows.assign(value=rows["value"] * 1.01)
    assert campaign(changed, QUICK) is not first


def test_unknown_things_raise(found, rows):
    with pytest.raises(KeyError):
        found.policy(replace(BASE, policy="longest_last"))
    with pytest.raises(ValueError, match="no block_time rows"):
        Campaign(rows[rows["model"] == "wan-1.3b"], QUICK).run(BASE)
    with pytest.raises(ValueError, match="one micro-batch"):
        found.run(replace(BASE, micro_batches=2))
