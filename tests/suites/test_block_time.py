"""The grid, the smoke path from case to rows, the replay of equal-token steps, the figures."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro.measure.machine import read_machine
from repro.suite import load
from suites import block_time

GPU = SimpleNamespace(has_gpu=True)


def rows_of(seconds, cells, device="nvidia-test"):
    """Full-profile rows of `cells` with step times from seconds(batch, tokens)."""
    base = {"schema": 1, "run_id": "r1", "suite": "block_time", "profile": "full", "metric": "forward_backward",
            "unit": "ms", "n": 5, "kind": "measured", "source": "", "device": device}  # fmt: skip
    table = [
        {**base, **cell, "value": v, "ci_low": 0.99 * v, "ci_high": 1.01 * v}
        for cell in cells
        for v in [1e3 * float(seconds(cell["batch"], cell["tokens"]))]
    ]
    return pd.DataFrame(table)


def full_cells():
    return [dict(c.key) for c in block_time.cases("full", GPU)]


def test_contract():
    assert load("block_time") is block_time
    for profile, machine in (("full", GPU), ("smoke", GPU), ("smoke", SimpleNamespace(has_gpu=False))):
        cells = block_time.cases(profile, machine)
        assert cells
        assert all(tuple(c.key) == block_time.PARAMETERS for c in cells)
        assert len({tuple(c.key.values()) for c in cells}) == len(cells)


def test_full_needs_a_gpu():
    assert block_time.cases("full", SimpleNamespace(has_gpu=False)) == []


@pytest.mark.parametrize("model", ["wan-14b", "wan-1.3b"])
def test_grid_covers_the_buckets_and_budgets(model):
    cells = {(c["batch"], c["tokens"]) for c in full_cells() if c["model"] == model and c["adaln"] == "eager"}
    for s in (1560, 7800, 14040, 20280, 26520, 32760, 3600, 18000, 32400, 46800):
        assert {(1, s), (max(1, 48_000 // s), s), (72_000 // s, s)} <= cells
    assert {256, 512, 1024, 65_536, 75_600} <= {s for _, s in cells}


def test_other_adalns_are_paired_with_eager():
    cells = full_cells()
    eager = {(c["model"], c["layers"], c["batch"], c["tokens"]) for c in cells if c["adaln"] == "eager"}
    others = [(c["model"], c["layers"], c["batch"], c["tokens"]) for c in cells if c["adaln"] != "eager"]
    assert others
    assert set(others) <= eager


def test_fits_its_time_on_a_gpu():
    assert sum(c.seconds for c in block_time.cases("full", GPU)) < 450


def test_smoke_case_gives_a_timed_row():
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    case = next(c for c in block_time.cases("smoke", machine) if c.key["adaln"] == "fused")
    (row,) = block_time.measure(case, machine, pd.DataFrame())
    assert (row.metric, row.unit, row.n, row.kind) == ("forward_backward", "ms", 3, "measured")
    assert len(row.samples) == 3
    assert row.ci_low <= row.value <= row.ci_high
    assert row.value == pytest.approx(np.median(row.samples))


def test_out_of_memory_is_a_reason_not_a_crash(monkeypatch):
    torch = pytest.importorskip("torch")
    from repro.measure import stack_time
    from repro.suite import CaseSkipped

    def oom(*_args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")

    monkeypatch.setattr(stack_time, "measure_stack", oom)
    case = block_time.cases("smoke", read_machine(gpus=0))[0]
    with pytest.raises(CaseSkipped, match=r"1 x 64 tokens do not fit: CUDA out of memory"):
        block_time.measure(case, read_machine(gpus=0), pd.DataFrame())


def test_replay_tells_quadratic_from_linear_time():
    by_square = rows_of(lambda b, s: 1e-9 * s * s, full_cells())
    tokens, square = block_time.replay(by_square, "wan-14b")
    assert square.value == pytest.approx(1.0)
    assert tokens.value < 0.5
    by_tokens = rows_of(lambda b, s: 1e-4 * b * s, full_cells())
    tokens, square = block_time.replay(by_tokens, "wan-14b")
    assert tokens.value == pytest.approx(1.0)
    assert tokens.low <= tokens.value <= tokens.high
    assert square.value < 0.5


@pytest.mark.parametrize("model", ["wan-14b", "wan-1.3b"])
def test_replay_matches_numpy_on_drawn_steps(model):
    """Of the model's own equal-token batches: R to the last digits, its interval as that of logs drawn one by one."""
    wanted = (model, block_time.LAYERS[model], "eager")
    own = [c for c in full_cells() if (c["model"], c["layers"], c["adaln"]) == wanted]
    others = rows_of(lambda b, s: 1.0, [c for c in full_cells() if c not in own])
    rows = pd.concat([rows_of(lambda b, s: 1e-4 * b * s + 5e-9 * b * s * s, own), others])
    tokens = np.array(block_time.BUCKETS)
    batch = np.maximum(1, 48_000 // tokens)
    seconds = 1e-4 * batch * tokens + 5e-9 * batch * tokens**2
    picks = np.random.default_rng(1).integers(0, 10, (2_000, 1_000))
    for found, x in zip(block_time.replay(rows, model), (batch * tokens, tokens**2), strict=True):
        assert found.value == pytest.approx(np.corrcoef(seconds, x)[0, 1], rel=1e-9)
        low, high = np.quantile([np.corrcoef(seconds[p], x[p])[0, 1] for p in picks], [0.025, 0.975])
        # quantiles of 2,000 draws are themselves known to a few percent of the width
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * (high - low))
        assert found.n == 1_000


def test_evidence_is_left_out_until_every_bucket_is_measured():
    rows = rows_of(lambda b, s: 1e-4 * b * s, full_cells())
    assert {e.claim for e in block_time.evidence(rows)} == {"B1", "B2"}
    assert block_time.evidence(rows[rows["tokens"] != 7800]) == []


def test_evidence_is_of_the_wide_blocks_and_tells_of_the_others():
    """Time in proportion to tokens at 14B width, to the square of a sample's length at 1.3B width."""
    wide = rows_of(lambda b, s: 1e-4 * b * s, [c for c in full_cells() if c["model"] == "wan-14b"])
    narrow = rows_of(lambda b, s: 1e-9 * s * s, [c for c in full_cells() if c["model"] == "wan-1.3b"])
    found = {e.claim: e for e in block_time.evidence(pd.concat([wide, narrow]))}
    assert found["B1"].value == pytest.approx(1.0) and found["B2"].value < 0.5
    assert {e.kind for e in found.values()} == {"simulated"}
    assert found["B2"].note.endswith("; 1.3B-wide blocks: 1.00")
    assert "total tokens" in found["B1"].note and "S squared" in found["B2"].note
    assert {e.claim for e in block_time.evidence(wide)} == {"B1", "B2"}
    assert block_time.evidence(narrow) == []


def test_draws_from_full_rows_only():
    rows = rows_of(lambda b, s: 1e-4 * b * s + 5e-9 * b * s * s, full_cells())
    figures = block_time.draw(rows)
    assert [f.name for f in figures] == ["block_time-nvidia-test", "equal_token_correlation-nvidia-test"]
    smoke = rows.assign(model="tiny")
    assert block_time.draw(smoke) == []
