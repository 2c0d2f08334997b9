"""The grid, rows from known times, T6, a smoke case."""

from types import SimpleNamespace

import pandas as pd
import pytest

from repro.measure.machine import read_machine
from repro.suite import CaseSkipped, load
from suites import kernel_share

GPU = SimpleNamespace(has_gpu=True, gpu_count=1)
CPU = SimpleNamespace(has_gpu=False, gpu_count=0)
STEP = {"eager": 110.0, "wan": 120.0, "fused": 100.0}


@pytest.fixture
def rows(monkeypatch):
    """Full rows; a step's time follows from its AdaLN and the length."""
    pytest.importorskip("torch")
    from repro.wan import launch

    def ask(call, asked, limit):
        ms = STEP[asked["adaln"]] * (1 if asked["frames_height_width"][0] == 1 else 10)
        times = {"seconds": [ms / 1e3] * 4, "marked": [ms / 1e3] * 2, "norm_modulate": [0.1 * ms / 1e3] * 2}
        return {**times, "kernels": {"attention": 0.02, "matmul": 0.05}, "peak_bytes": 20_000_000_000}

    monkeypatch.setattr(launch, "ranks", lambda count, device: SimpleNamespace(ask=ask))
    return pd.DataFrame([
        {"suite": "kernel_share", "profile": "full", "device": "gpu", **case.key, "metric": m.metric, "value": m.value,
         "ci_low": m.ci_low, "ci_high": m.ci_high, "n": m.n}
        for case in kernel_share.cases("full", GPU) for m in kernel_share.measure(case, GPU, pd.DataFrame())
    ])  # fmt: skip


def test_contract():
    assert load("kernel_share") is kernel_share
    for profile, machine in (("full", GPU), ("smoke", CPU)):
        found = kernel_share.cases(profile, machine)
        assert found and all(tuple(c.key) == kernel_share.PARAMETERS for c in found)
        assert len({tuple(c.key.values()) for c in found}) == len(found)
    full = kernel_share.cases("full", GPU)
    assert sum(c.seconds for c in full) < 150
    assert {c.key["adaln"] for c in full} == {"eager", "wan", "fused"}
    assert kernel_share.cases("full", CPU) == []
    assert kernel_share.cases("full", SimpleNamespace(has_gpu=True, gpu_count=2)) == []


def test_rows_tell_parts(rows):
    at = rows[(rows["adaln"] == "eager") & (rows["tokens"] == 1560) & (rows["model"] == "wan-1.3b")]
    found = dict(zip(at["metric"], at["value"], strict=True))
    assert found["step_time"] == pytest.approx(110.0)
    assert found["norm_modulate_share"] == pytest.approx(10.0)
    assert found["attention_time"] == pytest.approx(20.0) and found["matmul_time"] == pytest.approx(50.0)
    assert found["peak_memory"] == 20.0


def test_the_documents_get_steps_and_peaks_by_cell(rows):
    told = kernel_share.tell(rows)["fused-steps"].splitlines()
    assert len(told) == 2 + 7, "a head and the cells with both AdaLNs"
    assert all("| 110.0 [110.0, 110.0] | 100.0 [100.0, 100.0] | faster | 20.00 | 20.00 |" in line
               for line in told if "x 1,560 " in line)  # fmt: skip
    slower = rows.assign(value=rows["value"].where(rows["adaln"] != "fused", 2 * rows["value"]))
    slower["ci_low"] = slower["ci_high"] = slower["value"]
    assert "faster" not in kernel_share.tell(slower)["fused-steps"]
    wide = rows.assign(ci_low=0.0)
    assert kernel_share.tell(wide)["fused-steps"].count("undecided") == 7
    assert kernel_share.tell(rows.iloc[:0])["fused-steps"] == "Nothing is recorded yet."


def test_t6_is_the_gain_over_equal_token_steps(rows):
    (e,) = kernel_share.evidence(rows)
    assert e.claim == "T6" and e.kind == "measured"
    assert e.value == pytest.approx(10.0) and e.ci_low == pytest.approx(10.0)
    assert "wan-1.3b over wan: +20.0%" in e.note and "wan-14b over eager: +10.0%" in e.note
    assert "unknown" not in e.note
    longer = rows["value"].where((rows["adaln"] != "eager") | (rows["tokens"] != 46_800), rows["value"] * 2)
    (slower,) = kernel_share.evidence(rows.assign(value=longer))
    assert slower.value == pytest.approx(100 * ((110 + 1100 + 2200) / (100 + 1000 + 1000) - 1))
    assert kernel_share.evidence(rows[rows["adaln"] != "fused"]) == []
    assert kernel_share.evidence(rows[rows["tokens"] != 46_800]) == []


def test_the_interval_of_a_gain_is_that_of_the_worst_case():
    """Steps of 90, 100 and 120 ms against 75, 80 and 90 ms, over both lengths that the wide model has."""
    steps = {"eager": (100.0, 90.0, 120.0), "fused": (80.0, 75.0, 90.0)}
    cells = ((30, 1_560, 0.25), (1, 46_800, 0.75))
    own = pd.DataFrame([
        {"model": "wan-14b", "adaln": adaln, "metric": "step_time", "batch": batch, "tokens": tokens,
         "value": share * value, "ci_low": share * low, "ci_high": share * high}
        for adaln, (value, low, high) in steps.items() for batch, tokens, share in cells
    ])  # fmt: skip
    found = kernel_share.gain(own, "wan-14b", "eager")
    assert (found.value, found.n) == (pytest.approx(100 * (100 / 80 - 1)), 2)
    assert (found.low, found.high) == pytest.approx((100 * (90 / 90 - 1), 100 * (120 / 75 - 1)))


def test_what_does_not_fit_is_skipped(monkeypatch):
    pytest.importorskip("torch")
    from repro.wan import launch

    def ask(call, asked, limit):
        raise launch.RanksError("rank 0: OutOfMemoryError: 20 GiB", "OutOfMemoryError")

    monkeypatch.setattr(launch, "ranks", lambda count, device: SimpleNamespace(ask=ask))
    with pytest.raises(CaseSkipped, match="6 layers"):
        kernel_share.measure(kernel_share.cases("full", GPU)[0], GPU, pd.DataFrame())


def test_a_smoke_case_takes_marked_steps():
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    found = {
        m.metric: m for m in kernel_share.measure(kernel_share.cases("smoke", machine)[0], machine, pd.DataFrame())
    }
    assert set(found) == {"step_time", "norm_modulate_time", "norm_modulate_share"}
    assert 0 < found["norm_modulate_share"].value < 100
    assert found["step_time"].n == kernel_share.REPEATS
