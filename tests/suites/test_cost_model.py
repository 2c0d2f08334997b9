"""From block_time rows to fits, limits, batch sizes, evidence and figures."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro.balance.cost import reference_wan14b
from repro.suite import CaseSkipped, load
from suites import block_time, cost_model
from tests.balance.test_whole import rows as whole_model_rows

H200 = SimpleNamespace(has_gpu=True, memory_bytes=150_000_000_000)
REFERENCE = reference_wan14b(extrapolate=True)


def block_time_rows():
    """Rows of the whole grid: the reference cost, fused 3% cheaper a token, memory linear in tokens."""
    rows = []
    for case in block_time.cases("full", H200):
        key = dict(case.key)
        b, s, layers, width = key["batch"], key["tokens"], key["layers"], 1.0 if key["model"] == "wan-14b" else 0.3
        n = b * s
        seconds = width * float(REFERENCE.scaled(layers).seconds(b, s))
        if key["adaln"] == "fused":
            seconds -= 0.03 * width * layers * n * 4e-6
        static = 0.7 * layers * width
        held = width * n * (layers + 2) * 10.24e-6
        values = {
            "forward_backward": 1e3 * seconds,
            "static_memory": static,
            "held_memory": held,
            "peak_memory": static + held + width * (0.5 + n * 2e-4 + b * 0.02),
        }
        for metric, value in values.items():
            rows.append({"suite": "block_time", "profile": "full", "run_id": "r1", **key, "metric": metric,
                         "value": value, "ci_low": value, "ci_high": value, "n": 5, "kind": "measured"})  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def inputs():
    return block_time_rows()


@pytest.fixture(scope="module")
def measured(inputs):
    cells = [c for c in cost_model.cases("full", H200) if c.key["adaln"] != "wan" and c.key["form"] != "table"]
    return {tuple(c.key.values()): {m.metric: m for m in cost_model.measure(c, H200, inputs)} for c in cells}


@pytest.fixture(scope="module")
def rows(inputs, measured):
    own = [
        {"suite": "cost_model", "profile": "full", "run_id": "r2", "model": model, "adaln": adaln, "form": form,
         "metric": m.metric, "value": m.value, "ci_low": m.ci_low, "ci_high": m.ci_high, "n": m.n, "kind": m.kind,
         "source": m.source}
        for (model, adaln, form), metrics in measured.items() for m in metrics.values()
    ]  # fmt: skip
    return pd.concat([inputs, pd.DataFrame(own)], ignore_index=True)


def test_contract():
    assert load("cost_model") is cost_model
    keys = [tuple(c.key.values()) for c in cost_model.cases("full", H200)]
    assert len(keys) == len(set(keys)) == 2 * 3 * 3
    assert cost_model.cases("full", SimpleNamespace(has_gpu=False, memory_bytes=None)) == []


def test_the_quadratic_is_recovered_a_block(measured):
    found = measured["wan-14b", "eager", "quadratic"]
    assert found["b"].value == pytest.approx(127.6 / 3, rel=1e-3)
    assert found["c"].value == pytest.approx(47.75 / 3, rel=1e-3)
    assert found["held_out_mape"].value < 0.1
    assert (found["b"].unit, found["b"].kind, found["b"].source) == ("ms", "measured", "r1")


def test_fused_is_cheaper_by_its_tokens(measured):
    eager, fused = (measured["wan-14b", adaln, "quadratic"]["b"].value for adaln in ("eager", "fused"))
    assert eager - fused == pytest.approx(0.03 * 1e4 * 4e-6 * 1e3, rel=0.02)
    # part of the grid is put together from eager's times
    assert measured["wan-14b", "fused", "quadratic"]["b"].kind == "simulated"


def test_batch_table_follows_the_rule(measured):
    found = {metric: m.value for metric, m in measured["wan-14b", "eager", "power"].items()}
    limit, m_comp, p = found["m_mem_used"], found["m_comp"], found["p"]
    for s in block_time.BUCKETS:
        expected = max(1, min(limit // s, int(m_comp / s**p + 1e-9)))
        assert found[f"batch_at_{s}"] == expected
    longest = max(block_time.BUCKETS)
    assert found[f"batch_at_{longest}"] == limit // longest
    assert measured["wan-14b", "eager", "power"]["m_comp"].kind == "simulated"


def test_quadratic_table_stays_within_target_and_memory(measured):
    found = {metric: m.value for metric, m in measured["wan-14b", "eager", "quadratic"].items()}
    for s in block_time.BUCKETS:
        b = found[f"batch_at_{s}"]
        assert b * s <= found["m_mem_used"]
        assert float(REFERENCE.seconds(b, s)) <= found["target"] * 1.01
        if (b + 1) * s <= found["m_mem_used"]:
            assert float(REFERENCE.seconds(b + 1, s)) > found["target"] * 0.99


def test_m_mem_grows_with_the_device(inputs):
    case = next(c for c in cost_model.cases("full", H200) if c.key["form"] == "power")
    small = SimpleNamespace(has_gpu=True, memory_bytes=90_000_000_000)
    limits = [
        next(m.value for m in cost_model.measure(case, machine, inputs) if m.metric == "m_mem")
        for machine in (small, H200)
    ]
    assert limits[0] < limits[1]


def test_a_whole_model_s_sweep_goes_before_blocks():
    inputs = whole_model_rows()
    fused, eager = (
        {m.metric: m for m in cost_model.measure(c, H200, inputs)}
        for a in ("fused", "eager")
        for c in cost_model.cases("full", H200)
        if tuple(c.key.values()) == ("wan-1.3b", a, "quadratic")
    )
    assert fused["held_out_mape"].kind == "measured" and "sweep" in fused["b"].source
    assert eager["held_out_mape"].kind == "simulated", "put together from two suites"
    assert eager["held_out_mape"].n == fused["held_out_mape"].n and eager["held_out_mape"].value < 1
    assert fused["b"].value == pytest.approx(1.05 * 8 + 3 / 30, rel=1e-3), "ms a block, embeddings included"
    assert eager["b"].value - fused["b"].value == pytest.approx(2, rel=1e-3)
    assert fused["m_mem"].value > eager["m_mem"].value


def test_too_few_rows_are_a_reason(inputs):
    case = cost_model.cases("full", H200)[0]
    with pytest.raises(CaseSkipped, match="too few rows"):
        cost_model.measure(case, H200, inputs[inputs["tokens"] == 7800])


def test_evidence_is_the_held_out_error_of_the_paper_form(rows, measured):
    (evidence,) = cost_model.evidence(rows)
    row = measured["wan-14b", "eager", "power"]["held_out_mape"]
    assert (evidence.claim, evidence.value, evidence.kind) == ("B6", row.value, "measured")
    assert evidence.ci_low <= evidence.value <= evidence.ci_high
    assert f"p = {measured['wan-14b', 'eager', 'power']['p'].value:.4g}" in evidence.note
    assert "unknown" not in evidence.note
    assert evidence.note.count("% (measured: plain blocks on one GPU, no communication)") == 2
    mixed = rows.assign(kind=rows["kind"].where(rows["model"] != "wan-1.3b", "simulated"))
    assert "% (simulated: plain blocks" in cost_model.evidence(mixed)[0].note
    assert cost_model.evidence(rows[rows["suite"] == "block_time"]) == []


def test_draws_each_device_once(rows):
    both = pd.concat([rows.assign(device="a"), rows.assign(device="b")])
    assert [f.name for f in cost_model.draw(both)] == ["cost_model-a", "cost_model-b", "cost_model-devices"]
    assert cost_model.draw(rows[rows["model"] == "none"].assign(device="a")) == []


def test_intervals_hold_their_values(measured):
    for metrics in measured.values():
        assert all(m.ci_low <= m.value <= m.ci_high and np.isfinite(m.value) for m in metrics.values())
