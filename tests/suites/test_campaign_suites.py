"""imbalance, throughput, memory_use and sensitivity: from settings to rows, evidence and figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro.balance import assumptions
from repro.balance.campaign import PARAMETERS, WIDE, Effort, Setting
from repro.balance.cost import reference_wan14b
from repro.balance.memory import fit_memory, memory_limit
from repro.balance.models import MODELS
from repro.claims import BY_ID, judge
from repro.records import Store
from repro.report import style
from repro.suite import CaseSkipped, load
from suites import _campaign, block_time, imbalance, memory_use, sensitivity, throughput
from tests.suites.test_cost_model import block_time_rows

H200 = SimpleNamespace(has_gpu=True, memory_bytes=150_000_000_000)
CPU = SimpleNamespace(has_gpu=False, memory_bytes=8_000_000_000)
SUITES = (imbalance, memory_use, sensitivity, throughput)
QUICK = Effort(seeds=3, steps=30, micro_batches=600, fewest=20)
RESULTS = Path(__file__).parents[2] / "results"

PLAIN = ("equal_token", "dual_constraint")


def measured(suite, cases, inputs, machine=H200):
    """Rows of some cases, as the store would give them back."""
    profile = inputs["profile"].iloc[0]
    return pd.DataFrame([
        {"suite": suite.NAME, "profile": profile, "run_id": "r2", "device": "gpu", **case.key, "metric": m.metric,
         "unit": m.unit, "value": m.value, "ci_low": m.ci_low, "ci_high": m.ci_high, "n": m.n, "kind": m.kind,
         "source": m.source}
        for case in cases for m in suite.measure(case, machine, inputs)
    ]).assign(m_comp=lambda t: pd.to_numeric(t["m_comp"]))  # fmt: skip


@pytest.fixture(scope="module")
def inputs():
    return block_time_rows().assign(device="gpu")


@pytest.fixture(scope="module")
def quick():
    """Fewer seeds and steps, so that what is tested is the way and not the figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_campaign, "FULL", QUICK)
        patch.setattr(sensitivity, "WIDE", QUICK)
        original = _campaign.simulated
        simulated = lambda case, rows, effort=QUICK: original(case, rows, QUICK)  # noqa: E731
        patch.setattr(_campaign, "simulated", simulated)
        yield


@pytest.fixture(scope="module")
def swept(inputs, quick):
    """Sensitivity rows that notes quote."""
    cases = [
        c for c in sensitivity.cases("full", H200)
        if c.key["policy"] in PLAIN and c.key["model"] == "wan-14b" and c.key["protocol"] == "as_published"
        and c.key["ranks"] in (8, 16) and c.key["corpus"] in ("wan-uniform", "worst-case")
    ]  # fmt: skip
    return measured(sensitivity, cases, inputs)


@pytest.fixture(scope="module")
def fits():
    """Rows of cost_model with what fits the device on its number of ranks."""
    return pd.DataFrame([
        {"suite": "cost_model", "metric": "m_mem", "model": "wan-14b", "adaln": a, "form": "power", "value": v}
        for a, v in (("eager", 90_000), ("fused", 96_000))
    ])  # fmt: skip


@pytest.fixture(scope="module")
def gains(inputs, quick):
    cases = [
        c for c in throughput.cases("full", H200)
        if c.key["protocol"] == "as_published" and c.key["sync"] == "micro_batch" and c.key["adaln"] != "wan"
        and c.key["policy"] in (*PLAIN, "dual_constraint_same_bucket", "balanced")
    ]  # fmt: skip
    return measured(throughput, cases, inputs)


@pytest.fixture(scope="module")
def imbalances(inputs, quick):
    cases = [c for c in imbalance.cases("full", H200) if c.key["policy"] in PLAIN or c.key["corpus"] == "wan-uniform"]
    return measured(imbalance, cases, inputs)


@pytest.fixture(scope="module")
def memory(inputs, quick):
    return measured(memory_use, memory_use.cases("full", H200), inputs)


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.NAME)
def test_contract(suite):
    assert load(suite.NAME) is suite
    assert suite.SIMULATED
    assert suite.cases("full", CPU) == []
    for profile, machine in (("full", H200), ("smoke", H200), ("smoke", CPU)):
        cases = suite.cases(profile, machine)
        assert cases
        assert all(tuple(c.key) == PARAMETERS == suite.PARAMETERS for c in cases)
        assert len({tuple(c.key.values()) for c in cases}) == len(cases)


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.NAME)
def test_smoke_from_tiny_rows(suite):
    cost = reference_wan14b(extrapolate=True)
    tiny = pd.DataFrame([
        {"suite": "block_time", "profile": "smoke", "run_id": "r1", **c.key, "metric": "forward_backward",
         "value": 1e3 * float(cost.seconds(c.key["batch"], c.key["tokens"]))}
        for c in block_time.cases("smoke", CPU)
    ])  # fmt: skip
    for case in suite.cases("smoke", CPU):
        rows = suite.measure(case, CPU, tiny)
        assert {m.kind for m in rows} == {"simulated"}
        assert {m.source for m in rows} == {"r1"}
        assert all(m.ci_low <= m.value <= m.ci_high and np.isfinite(m.value) and m.n == 2 for m in rows)


@pytest.mark.parametrize("suite", SUITES, ids=lambda s: s.NAME)
def test_too_few_rows_are_a_reason(suite, inputs):
    with pytest.raises(CaseSkipped, match="too few rows"):
        suite.measure(suite.cases("full", H200)[0], H200, inputs[inputs["tokens"] == 7800])


def test_interval_is_students():
    found = _campaign.interval([1.0, 2.0, 3.0])
    # t(0.975, 2 degrees) = 4.303, standard error 1 / sqrt(3)
    assert (found.value, found.n) == (2.0, 3)
    assert found.high == pytest.approx(2 + 4.303 / np.sqrt(3), abs=1e-3)
    assert _campaign.interval([2.0, 2.0]).low == 2.0
    with pytest.raises(ValueError, match="at least two"):
        _campaign.interval([1.0])


def test_throughput_evidence_tells_batching_from_the_fused_op(inputs, gains, swept):
    rows = pd.concat([inputs, gains, swept], ignore_index=True)
    found = {e.claim: e for e in throughput.evidence(rows)}
    assert set(found) == {"T1", "T2", "T3"}
    for claim, ranks in (("T1", 8), ("T2", 16)):
        whole = Setting("dual_constraint", "fused", ranks)
        e = found[claim]
        assert e.kind == "simulated"
        assert e.value == _campaign.value(gains, whole, "gain")
        # The mean of paired ratios is not the ratio of means, but close on so few seeds.
        assert 100 * (e.treated / e.baseline - 1) == pytest.approx(e.value, abs=0.5)
        for part in (replace(whole, adaln="eager"), replace(whole, policy="equal_token")):
            alone = _campaign.value(gains, part, "gain")
            assert alone < e.value
            assert f"{alone:+.1f}%" in e.note
        assert "unknown" not in e.note
        assert "58,896 tokens" in e.note
        assert "needs M_mem" in e.note
    worst = Setting("dual_constraint", "fused", 16, corpus="worst-case")
    assert found["T3"].value == pytest.approx(1 + _campaign.value(gains, worst, "gain") / 100)
    assert judge(BY_ID["T3"], found["T3"])[0] == "reproduced"


def test_throughput_notes_tell_samples_a_step(inputs, gains, swept):
    found = {e.claim: e for e in throughput.evidence(pd.concat([inputs, gains, swept], ignore_index=True))}
    for claim, ranks, corpus in (("T1", 8, "wan-uniform"), ("T2", 16, "wan-uniform"), ("T3", 16, "worst-case")):
        at = {s: Setting(*s, ranks, corpus=corpus) for s in (("dual_constraint", "fused"), ("balanced", "fused"))}
        for setting in at.values():
            own, base = (_campaign.value(gains, s, "samples_per_step") for s in (setting, setting.baseline()))
            assert own > base
            assert f"{100 * (own / base - 1):.1f}% more samples an optimizer step" in found[claim].note
    one = _campaign.lookup(gains, Setting("equal_token", "eager", 8), "samples_per_step")
    assert (one["unit"], one["value"]) == ("samples", pytest.approx(8 * 6, rel=0.02))  # six a micro-batch on average


def test_fewer_samples_a_step_are_called_fewer():
    setting = Setting("balanced", "eager", 8)
    steps = {setting: 90.0, setting.baseline(): 100.0}
    table = pd.DataFrame([{**s.key, "metric": "samples_per_step", "value": v} for s, v in steps.items()])
    assert _campaign.more_samples(table, setting) == "10.0% fewer samples an optimizer step"
    assert "unknown" in _campaign.more_samples(table.iloc[:1], setting)


def test_what_fits_the_device_stands_in_the_note(inputs, gains, swept, fits):
    rows = pd.concat([inputs, gains, swept, fits], ignore_index=True)
    found = {e.claim: e.note for e in throughput.evidence(rows)}
    whole = Setting("dual_constraint", "fused", 8, m_mem=96_000)
    gain = f"{_campaign.value(swept, whole, 'gain'):+.1f}%"
    assert f"{gain} at (b) (96,000 tokens, what fits the device on 8 ranks)" in found["T1"]
    assert "what fits the device on 16 ranks" in found["T2"]
    # The fused op's gain alone lifts the floor, whatever memory there is.
    assert "a floor as high holds at 48,000 tokens already" in found["T3"]


def test_what_fits_follows_the_ranks(inputs, fits):
    size, memory = MODELS["wan-14b"], fit_memory(inputs, "wan-14b", "fused")
    shortest = min(block_time.BUCKETS)
    eight, sixteen = (memory_limit(memory, size, 120e9, r, "micro_batch", shortest) for r in (8, 16))
    stated = fits.assign(value=float(eight))
    rows = pd.concat([inputs, stated], ignore_index=True)
    assert _campaign.m_mem_of_device(rows, "wan-14b", "fused", 8) == eight
    assert sixteen > eight + 10_000
    assert _campaign.m_mem_of_device(rows, "wan-14b", "fused", 16) == pytest.approx(sixteen, abs=2)  # whole tokens
    assert _campaign.m_mem_of_device(inputs, "wan-14b", "fused", 16) is None


def test_balanced_decides_no_claim(inputs, gains, imbalances, memory, swept):
    rows = pd.concat([inputs, gains, imbalances, memory, swept], ignore_index=True)
    without = rows[rows["policy"] != "balanced"]
    for suite in SUITES:
        everything = [(e.claim, e.value, e.ci_low, e.ci_high) for e in suite.evidence(rows)]
        assert everything == [(e.claim, e.value, e.ci_low, e.ci_high) for e in suite.evidence(without)]


def test_imbalance_evidence(inputs, imbalances):
    found = {e.claim: e for e in imbalance.evidence(pd.concat([inputs, imbalances], ignore_index=True))}
    assert set(found) == {"B3", "B4", "B7"}
    base, rule = (Setting(p, "eager", 16) for p in PLAIN)
    for claim, cv in (("B3", "load_cv"), ("B4", "step_cv")):
        e = found[claim]
        assert (e.baseline, e.treated) == tuple(100 * _campaign.value(imbalances, s, cv) for s in (base, rule))
        assert e.value == pytest.approx(100 * (1 - e.treated / e.baseline), abs=3)
        assert "M_comp binds in" in e.note
        assert "unknown" not in e.note
    falls = imbalances[(imbalances["metric"] == "rank_cv_fall") & (imbalances["policy"] == "dual_constraint")]
    assert found["B7"].value == falls[falls["m_comp"] == 1.0]["value"].max()
    assert len(falls[falls["m_comp"] == 1.0]) == 2 * 8


def test_the_largest_fall_is_of_the_rule_as_published():
    """Looser compute limits and other policies take more off, and are not what B7 is about."""
    rule = Setting("dual_constraint", "eager", 16)
    falls = {
        rule: 10.0,
        replace(rule, corpus="images"): 20.0,
        replace(rule, m_comp=assumptions.M_COMP_LOOSE): 30.0,
        replace(rule, policy="balanced"): 40.0,
    }
    table = pd.DataFrame([
        {"suite": "imbalance", **s.key, "metric": "rank_cv_fall", "value": v, "ci_low": v - 1, "ci_high": v + 1}
        for s, v in falls.items()
    ])  # fmt: skip
    (found,) = imbalance.evidence(table)
    assert (found.claim, found.value, found.ci_low, found.ci_high) == ("B7", 20.0, 19.0, 21.0)
    assert "at images on 16 ranks" in found.note


def test_imbalance_and_memory_notes_tell_other_limits(inputs, imbalances, memory, swept, fits):
    rows = pd.concat([inputs, imbalances, memory, swept, fits], ignore_index=True)
    notes = {e.claim: e.note for s in (imbalance, memory_use) for e in s.evidence(rows)}
    rule = Setting("dual_constraint", "eager", 16, m_mem=72_000)
    for claim, cv in (("B3", "load_cv"), ("B4", "step_cv")):
        m_mem, falls = sensitivity.along_m_mem(swept, rule, cv)
        after, before = (_campaign.value(swept, s, cv) for s in (rule, rule.baseline()))
        assert dict(zip(m_mem, falls, strict=True))[72_000] == pytest.approx(100 * (1 - after / before))
        assert f"{falls[2]:+.1f}% at (a)" in notes[claim]
        assert "what fits the device on 16 ranks" in notes[claim]
        assert f"the paper's {imbalance.PAPER_FALLS[cv]:g}%" in notes[claim]
    m_mem, rises = sensitivity.along_m_mem(swept, replace(rule, ranks=8), "peak_memory")
    assert rises == sorted(rises)
    assert f"{np.interp(90_000, m_mem, rises):+.1f}% at (b) (90,000 tokens, what fits the device on 8" in notes["B5"]
    assert "the paper's 22.7%" in notes["B5"]
    # B7's largest fall may be at a corpus on which M_mem was not varied; it was on these two.
    varied = rows[rows["corpus"].isna() | rows["corpus"].isin(["wan-uniform", "worst-case"])]
    (largest,) = (e.note for e in imbalance.evidence(varied) if e.claim == "B7")
    assert "at (b)" in largest
    assert "the paper's 50%" in largest
    bare = imbalance.evidence(pd.concat([inputs, imbalances], ignore_index=True))
    assert all("M_mem was not varied here" in e.note for e in bare)


def test_notes_say_what_an_interval_covers(inputs, imbalances, gains):
    rows = pd.concat([inputs, imbalances, gains], ignore_index=True)
    found = [e for s in (imbalance, throughput) for e in s.evidence(rows)]
    assert len(found) == 6
    assert all(_campaign.COVERED in e.note and "no width" not in e.note for e in found)
    effect = pd.Series({"value": 5.0, "ci_low": 5.0 - 1e-14, "ci_high": 5.0 + 1e-14})  # a mean of equal seeds
    note = _campaign.evidence("B5", effect, (1.0, 2.0), "as fitted").note
    assert note.startswith("as fitted; ")
    assert note.endswith("no width since every seed deals the same micro-batches")


def test_which_bound_binds(inputs, quick):
    rows = inputs
    tight = Setting("dual_constraint", "eager", 16, m_comp=0.1)
    assert "M_comp binds in 0 of 10" in imbalance._binding(rows, replace(tight, m_comp=10.0))
    # M_mem leaves one sample of 32,400, 32,760 and 46,800 tokens anyway.
    assert "M_comp binds in 7 of 10" in imbalance._binding(rows, tight)


def test_memory_evidence_is_the_policys_alone(inputs, memory):
    (e,) = memory_use.evidence(pd.concat([inputs, memory], ignore_index=True))
    assert (e.claim, e.kind) == ("B5", "simulated")
    assert e.value == _campaign.value(memory, Setting("dual_constraint", "eager", 8), "device_use_rise")
    assert 0 < e.value < 22.7  # pinned buckets and state keep it below the rise of the limit
    assert e.value == pytest.approx(100 * (e.treated / e.baseline - 1), abs=0.2)
    use = memory[memory["metric"] == "memory_use"]["value"]
    assert ((use > 0) & (use <= 1)).all()
    peak, share = (memory[memory["metric"] == m]["value"].to_numpy() for m in ("peak_memory", "device_use"))
    assert share == pytest.approx(1e9 * peak / H200.memory_bytes)


def test_gain_grows_with_memory_until_the_compute_bound(swept):
    whole = Setting("dual_constraint", "fused", 16)
    for m_comp in (1.0, 1.5):
        m_mem, gain = sensitivity.along_m_mem(swept, replace(whole, m_comp=m_comp))
        assert m_mem == [round(r * 48_000) for r in sensitivity.RATIOS]
        assert gain[0] < gain[4] < gain[6]
        assert gain[-1] == pytest.approx(gain[-2], abs=12)


def test_the_m_mem_of_a_gain_is_interpolated():
    setting = Setting("dual_constraint", "fused", 8)
    lines = dict(zip(sensitivity.m_mems(), (0.0, 5.0, 10.0, 20.0, 30.0, 25.0, 25.0, 25.0, 25.0), strict=True))
    table = pd.DataFrame([
        {**replace(setting, m_mem=m).key, "metric": "gain", "value": g} for m, g in lines.items()
    ])  # fmt: skip
    low, high = (round(r * 48_000) for r in (1.35, 1.5))
    assert sensitivity.m_mem_for(table, setting, 25.0) == pytest.approx((low + high) / 2)
    assert sensitivity.m_mem_for(table, setting, 20.0) == low
    assert sensitivity.m_mem_for(table, setting, -1.0) == 48_000
    assert sensitivity.m_mem_for(table, setting, 31.0) is None
    assert sensitivity.m_mem_for(table.iloc[:0], setting, 1.0) is None
    rows = table.assign(suite="sensitivity")
    at = replace(setting, m_mem=72_000)
    found = sensitivity.elsewhere(rows, at, 25.0)
    assert found == f"+30.0% at (a), the paper's 25% needs M_mem {(low + high) / 2:,.0f} tokens"
    assert sensitivity.elsewhere(rows, at, 31.0).endswith("the paper's 31% is reached nowhere up to 144,000 tokens")
    assert sensitivity.elsewhere(rows, at, 0.0, what="no loss").endswith(
        "no loss holds at 48,000 tokens already, the least that was simulated"
    )
    assert sensitivity.elsewhere(rows, replace(at, corpus="images"), 1.0) == "M_mem was not varied here"


def test_matched_cases_tell_balanceds_lead(inputs, quick):
    wanted = {("equal_token", 8), ("longest_first", 8), ("balanced", 8)}
    cases = [
        c for c in sensitivity.cases("full", H200)
        if c.key["protocol"] == "matched" and c.key["corpus"] == "koala-36m"
        and (c.key["policy"], c.key["ranks"]) in wanted
    ]  # fmt: skip
    rows = measured(sensitivity, cases, inputs)
    rate = rows[rows["metric"] == "samples_per_s"].set_index("policy")["value"]
    lead = rows[rows["metric"] == "balanced_lead"].set_index("policy")["value"]
    assert set(lead.index) == {"equal_token", "longest_first"}
    assert lead["equal_token"] == pytest.approx(100 * (rate["balanced"] / rate["equal_token"] - 1), abs=0.5)
    rivals = sensitivity.rivals(rows)
    distance = rows[rows["metric"] == "mix_distance"].set_index("policy")["value"]
    near = [p for p in lead.index if distance[p] <= distance["balanced"]]
    assert near == ["equal_token"] or near == ["equal_token", "longest_first"]
    assert dict(zip(rivals["policy"], rivals["value"], strict=True)) == dict(lead[near])


def test_draws_each_device_and_nothing_of_smoke(inputs, gains, imbalances, memory, swept):
    rows = pd.concat([inputs, gains, imbalances, memory, swept], ignore_index=True)
    expected = {
        imbalance: ["imbalance-gpu"],
        memory_use: ["memory_use-gpu"],
        sensitivity: ["sensitivity-gpu", "sensitivity_policies-gpu"],
        throughput: ["throughput-gpu"],
    }
    with style.context():
        for suite, names in expected.items():
            assert [f.name for f in suite.draw(rows)] == names
            assert suite.draw(rows.assign(model="tiny")) == []


def test_frontier_shows_every_policy(inputs, quick):
    cases = [
        c for c in throughput.cases("full", H200)
        if c.key["protocol"] == "matched" and c.key["ranks"] == throughput.FRONTIER_RANKS
        and c.key["micro_batches"] == 4 and c.key["sync"] == "micro_batch"
    ]  # fmt: skip
    assert len(cases) == 8
    rows = measured(throughput, cases, inputs)
    with style.context():
        figure = throughput.draw(rows)[-1]
    assert figure.name == "frontier-gpu"
    assert {len(ax.get_legend_handles_labels()[1]) for ax in figure.figure.axes} == {0, 8}


def committed():
    """Devices with full rows of `sensitivity`."""
    store = Store(RESULTS)
    return [d for d in store.devices() if len(store.rows("sensitivity", d, "full"))]


@pytest.mark.parametrize("device", committed() or [pytest.param("", marks=pytest.mark.skip("no committed rows"))])
def test_balanced_is_never_slower_than_a_policy_of_no_larger_mix_distance(device):
    rows = Store(RESULTS).rows("sensitivity", device, "full")
    found = sensitivity.rivals(rows)
    assert len(found)
    slower = found[found["ci_high"] < 0]
    assert slower.empty, slower.to_string()


def deviations(suite, device):
    """Of matched rows: samples a step over the baseline's in the same setting, less 1, by setting."""
    rows = Store(RESULTS).rows(suite.NAME, device, "full")
    found = rows[(rows["protocol"] == "matched") & (rows["metric"] == "samples_per_step")]
    cell = ["ranks", "corpus", "sync", "micro_batches", "m_mem"]
    base = found[found["policy"] == "equal_token"].set_index(cell)["value"]
    return found.assign(off=found["value"] / base.loc[list(found[cell].itertuples(index=False))].to_numpy() - 1)


@pytest.mark.parametrize("device", committed() or [pytest.param("", marks=pytest.mark.skip("no committed rows"))])
def test_committed_matched_settings_have_equal_samples_a_step(device):
    found = deviations(throughput, device)
    assert len(found) == 8 * 3 * 3 * 2
    assert found["off"].abs().max() < 0.01
    # The lattice's epochs on many ranks have fewer than 100 steps, of which the tail may take one more or less.
    found = deviations(sensitivity, device)
    assert len(found) == 8 * 8 * 5
    steps = (found["ranks"] * found["micro_batches"]).map(WIDE.steps_on)
    beyond = found[found["off"].abs() >= np.maximum(0.01, 1.01 / (steps - 1))]
    assert beyond.empty, beyond[["policy", "ranks", "corpus", "off"]].to_string()


def test_the_never_slower_lattice_is_whole():
    matched = [c.key for c in sensitivity.cases("full", H200) if c.key["protocol"] == "matched"]
    assert {k["ranks"] for k in matched} == {2, 8, 16, 64, 1024}
    assert len(matched) == 8 * 5 * 8
    assert {k["ranks"] for k in (c.key for c in sensitivity.cases("full", H200))} >= {1, 1024}
    assert {c.key["model"] for c in sensitivity.cases("full", H200)} == {"wan-14b", "wan-1.3b"}
    assert assumptions.MEMORY_RISE in sensitivity.RATIOS
