"""The search, the grid, budgets that come from the baseline, T4, a smoke case."""

from types import SimpleNamespace

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.measure.machine import read_machine
from repro.suite import CaseSkipped, load
from suites import max_sequence

GPU = SimpleNamespace(has_gpu=True, gpu_count=1)
CPU = SimpleNamespace(has_gpu=False, gpu_count=0)
WORKING = {"wan": 200_000, "eager": 150_000, "fused": 100_000}
"""Bytes a token of the block at work; checkpoints are 10,000 a token and block."""


def parts(asked, tokens):
    static, held = 10**9, 10_000 * asked["layers"] * tokens
    return static, held, static + held + WORKING[asked["adaln"]] * tokens


@pytest.fixture
def rows(monkeypatch):
    """Full rows of ranks whose memory is proportional to tokens."""
    pytest.importorskip("torch")
    from repro.wan import launch, probing_memory

    def ask(call, asked, limit):
        def peak(frames):
            return parts(asked, 400 * frames)[2]

        frames = asked["start"]
        if "budget" in asked:
            frames = probing_memory._search(peak, asked["budget"], asked["start"], asked["most"], 10**9)
        static, held, top = parts(asked, 400 * frames)
        return {"tokens": 400 * frames, "static": static, "held": held, "peak": top}

    monkeypatch.setattr(launch, "ranks", lambda count, device: SimpleNamespace(ask=ask))
    table = pd.DataFrame()
    for case in max_sequence.cases("full", GPU):
        head = {"suite": "max_sequence", "profile": "full", "device": "gpu", **case.key}
        found = max_sequence.measure(case, GPU, table)
        new = [{**head, "metric": m.metric, "value": m.value, "ci_low": m.value, "ci_high": m.value, "kind": m.kind}
               for m in found]  # fmt: skip
        table = pd.concat([table, pd.DataFrame(new)], ignore_index=True)
    return table


def test_contract():
    assert load("max_sequence") is max_sequence
    for profile, machine in (("full", GPU), ("smoke", CPU)):
        found = max_sequence.cases(profile, machine)
        assert found and all(tuple(c.key) == max_sequence.PARAMETERS for c in found)
        assert [c.key["adaln"] for c in found[:3]] == ["wan", "eager", "fused"], "the budget comes first"
        assert all(c.seconds < 90 for c in found) and sum(c.seconds for c in found) < 110
    assert max_sequence.cases("full", CPU) == []


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 500), st.integers(1, 200), st.integers(1, 300), st.integers(0, 10**6))
def test_the_search_finds_the_longest_that_fits(static, slope, start, most, room):
    pytest.importorskip("torch")
    from repro.wan.probing_memory import _search

    budget = static + slope + room
    asked = []

    def peak(frames):
        asked.append(frames)
        return static + slope * frames + frames**2 // 7  # a little more than linear

    start = min(start, most)
    if peak(1) > budget:
        with pytest.raises(ValueError, match="one latent frame"):
            _search(peak, budget, start, most, static)
        return
    found = _search(peak, budget, start, most, static)
    assert peak(found) <= budget and (found == most or peak(found + 1) > budget)


def test_few_lengths_are_tried_where_memory_is_linear():
    pytest.importorskip("torch")
    from repro.wan.probing_memory import _search

    tried = set()

    def peak(frames):
        tried.add(frames)
        return max(9_000, 5_000 + 37 * frames)  # of short samples, that of the gradients

    assert _search(peak, 5_000 + 37 * 143 + 20, 120, 300, 5_000) == 143
    assert tried == {1, 120, 143, 144}, "lengths that take seconds each"


def test_t4_is_the_ratio_at_the_baselines_peak(rows):
    (e,) = max_sequence.evidence(rows)
    assert (e.claim, e.kind, e.baseline) == ("T4", "measured", 48_000)
    budget = 30 * 10_000 + WORKING["wan"]
    assert e.treated == 400 * int(48_000 * budget / (budget - 100_000) / 400)
    assert e.value == e.ci_low == e.treated / 48_000 and e.ci_high == (e.treated + 400) / 48_000
    # 40 blocks hold 400,000 bytes a token beside the block at work
    assert f"fused {600 / 500:.3f}x" in e.note
    assert "unknown" not in e.note
    assert max_sequence.evidence(rows[rows["adaln"] != "fused"]) == []
    assert e.decides
    of_baseline = (rows["adaln"] == "wan") & (rows["metric"] == "peak_memory")
    (apart,) = max_sequence.evidence(rows.assign(value=rows["value"].where(~of_baseline, 0.9 * rows["value"])))
    assert not apart.decides and apart.note.startswith("not at equal peaks")


def test_without_a_budget_the_reason_is_given():
    with pytest.raises(CaseSkipped, match="baseline's peak"):
        max_sequence.measure(max_sequence.cases("full", GPU)[1], GPU, pd.DataFrame())


def test_smoke_cases_count_what_is_saved():
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    table = pd.DataFrame()
    for case in max_sequence.cases("smoke", machine):
        found = {m.metric: m.value for m in max_sequence.measure(case, machine, table)}
        head = {"suite": "max_sequence", **case.key}
        new = [{**head, "metric": m, "value": v} for m, v in found.items()]
        table = pd.concat([table, pd.DataFrame(new)], ignore_index=True)
    longest = table[table["metric"] == "longest"].set_index("adaln")["value"]
    assert longest["wan"] == 16 and longest["fused"] >= longest["eager"] >= 16
    peaks = table[table["metric"] == "peak_memory"].set_index("adaln")["value"]
    assert (peaks <= peaks["wan"]).all()
