"""Suite `accelerate`: grid, rows of a smoke run, what it skips and refuses, figure."""

from __future__ import annotations

import sys
from typing import Any

import pandas as pd
import pytest

from repro.measure.machine import Machine
from repro.report import style
from repro.suite import CaseSkipped, load
from suites import accelerate

CPU = Machine("cpu-x86-64-2c", "cpu x86_64 2c", 0, None, None, 24 << 30, 2, {})
H200 = Machine("nvidia-h200", "NVIDIA H200", 1, (9, 0), 132, 150 << 30, 16, {})


@pytest.mark.parametrize(("profile", "machine"), [("smoke", CPU), ("smoke", H200), ("full", H200)])
def test_cases_keep_the_contract(profile: Any, machine: Machine) -> None:
    load("accelerate")
    cases = accelerate.cases(profile, machine)
    keys = [tuple(c.key.items()) for c in cases]
    assert cases and len(set(keys)) == len(keys)
    assert all(tuple(c.key) == accelerate.PARAMETERS and c.seconds > 0 for c in cases)
    # what fused is compared with comes right before it
    for before, after in zip(cases[::2], cases[1::2], strict=True):
        assert dict(after.key) == dict(before.key) | {"adaln": "fused"} and before.key["adaln"] == "wan"
    assert sum(c.seconds for c in cases) < 200


def test_latents_have_the_tokens_they_stand_for() -> None:
    for tokens, (frames, height, width) in accelerate.LATENTS.items():
        assert frames * (height // 2) * (width // 2) == tokens


def test_rows_of_a_smoke_run() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    accelerate._sample.cache_clear()
    wan, fused = accelerate.cases("smoke", CPU)
    # Starts with fused, as a resumed run may.
    after, before = ({m.metric: m for m in accelerate.measure(c, CPU, pd.DataFrame())} for c in (fused, wan))
    assert set(before) == {"forward_backward"} and set(after) == {"forward_backward", "speedup"}
    assert after["speedup"].value == pytest.approx(before["forward_backward"].value / after["forward_backward"].value)
    accelerate.forget(fused, CPU)
    again = accelerate.measure(wan, CPU, pd.DataFrame())[0]
    assert again.samples != before["forward_backward"].samples


def test_an_op_that_changes_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    from repro.adaln import diffusers_wan
    from repro.measure import verify

    op = diffusers_wan.layer_norm_modulate
    monkeypatch.setattr(diffusers_wan, "layer_norm_modulate", lambda x, shift, scale, eps: op(x, shift, 2 * scale, eps))
    accelerate._sample.cache_clear()
    with pytest.raises(verify.WrongResultError, match="accelerate changes the output by"):
        accelerate.measure(accelerate.cases("smoke", CPU)[1], CPU, pd.DataFrame())


def test_without_diffusers_it_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(CaseSkipped, match="pip install diffusers"):
        accelerate.measure(accelerate.cases("smoke", CPU)[0], CPU, pd.DataFrame())


def test_figure_shows_before_and_after() -> None:
    rows = pd.DataFrame(
        [
            {"device": "nvidia-h200", "suite": "accelerate", "profile": "full", **c.key, "metric": metric, "n": 10}
            | {"value": 80.0, "ci_low": 79.0, "ci_high": 81.0, "unit": "", "kind": "measured"}
            for c in accelerate.cases("full", H200)
            for metric in ("forward_backward", "peak_memory")
        ]
    )
    with style.context():
        (figure,) = accelerate.draw(rows)
    labels = [t.get_text() for t in figure.figure.axes[0].get_yticklabels()]
    assert "14B, S=32,760, checkpointed" in labels and len(labels) == 8
    assert "1.3B 4, 14B 2" in figure.caption
    assert accelerate.draw(rows.assign(model="tiny")) == [] and accelerate.evidence(rows) == []


def test_the_documents_get_before_and_after() -> None:
    values = {("wan", "forward_backward"): 80.0, ("fused", "forward_backward"): 64.0, ("fused", "speedup"): 1.25}
    values |= {("wan", "peak_memory"): 20.0, ("fused", "peak_memory"): 15.5}
    rows = pd.DataFrame(
        [
            {"device": "nvidia-h200", **c.key, "metric": metric, "n": 10, "value": v, "ci_low": v, "ci_high": v}
            for c in accelerate.cases("full", H200)
            for (adaln, metric), v in values.items()
            if adaln == c.key["adaln"]
        ]
    )
    told = accelerate.tell(rows)["accelerate"].splitlines()
    assert len(told) == 2 + 8
    assert "| 14B, 2 blocks | 32,760 | full | 80.0 to 64.0 | 1.250x [1.250, 1.250] | 20.00 to 15.50 |" in told[3]
    assert accelerate.tell(rows[rows["adaln"] == "wan"])["accelerate"] == "Nothing is recorded yet."
