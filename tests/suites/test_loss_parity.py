"""The runs, pairing by seed, T5, a smoke run."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from repro.claims import BY_ID, judge
from repro.measure.machine import read_machine
from repro.report import style
from repro.suite import load
from suites import _campaign, loss_parity

GPU = SimpleNamespace(has_gpu=True, gpu_count=1)
CPU = SimpleNamespace(has_gpu=False, gpu_count=0)


def rows(loss):
    """Full rows with the final loss from loss(variant, seed)."""
    table = []
    for case in loss_parity.cases("full", GPU):
        key = dict(case.key)
        final = loss((key["policy"], key["adaln"], key["weighting"]), key["seed"])
        steps = 160 if key["policy"] == "equal_token" else 140
        values = {"loss_before": 1.2, "loss_after": final, "steps": steps, "curve_at_0": 1.0, "curve_at_1": final}
        for metric, value in values.items():
            table.append({"suite": "loss_parity", "device": "gpu", **key, "metric": metric, "value": value})
    return pd.DataFrame(table)


def test_contract():
    assert load("loss_parity") is loss_parity
    for profile, machine in (("full", GPU), ("smoke", CPU)):
        found = loss_parity.cases(profile, machine)
        assert found and all(tuple(c.key) == loss_parity.PARAMETERS for c in found)
        assert len({tuple(c.key.values()) for c in found}) == len(found)
    full = [c.key for c in loss_parity.cases("full", GPU) if c.key["corpus"] == "moving-shapes"]
    assert len({k["seed"] for k in full}) >= 3 and len({k["samples"] for k in full}) == 1
    order = [(k["policy"], k["adaln"], k["weighting"]) for k in full]
    first = [v for v in loss_parity.VARIANTS for _ in loss_parity.SEEDS]
    assert order[: len(first)] == first, "a run cut short has whole comparisons"
    seeds = {v: {k["seed"] for k, of in zip(full, order, strict=True) if of == v} for v in loss_parity.VARIANTS}
    claimed = (loss_parity.BASELINE, loss_parity.ADAPTIVELOAD)
    assert all(len(seeds[v]) > len(loss_parity.SEEDS) for v in claimed), "what T5 compares has more of them"
    assert all(c.seconds < 90 for c in loss_parity.cases("full", GPU))
    assert loss_parity.cases("full", CPU) == []


def test_every_bucket_has_whole_micro_batches_of_the_budget():
    tokens = [(f // 4 + 1) * h // 16 * (w // 16) for (f, h, w), _ in loss_parity.MIX]
    assert [loss_parity.BUDGET // t for t in tokens] == [share for _, share in loss_parity.MIX]


def test_differences_are_paired_by_seed():
    """Seeds differ by far more than variants, which costs nothing."""
    table = rows(lambda v, seed: (0.4 + 0.1 * seed) * (1.01 if v == loss_parity.ADAPTIVELOAD else 1.0))
    assert loss_parity.differences(table, loss_parity.ADAPTIVELOAD) == pytest.approx([1.0] * 6)
    (e,) = loss_parity.evidence(table)
    assert (e.claim, e.kind) == ("T5", "measured") and e.value == pytest.approx(1.0)
    assert e.treated / e.baseline == pytest.approx(1.01)
    assert judge(BY_ID["T5"], e)[0] == "reproduced"
    assert "160 updates, of AdaptiveLoad 140;" in e.note
    assert e.note.endswith("on clips and photographs +1.00% [1.00, 1.00] (3 seeds, from 1.20 to 0.50)")
    assert loss_parity.evidence(table[table["corpus"] == "moving-shapes"])[0].note.endswith("photographs not run")
    assert loss_parity.margin() == 2.0
    assert loss_parity.evidence(table[table["seed"] == 0]) == []


def test_a_worse_or_uncertain_loss_is_no_equivalence():
    worse = rows(lambda v, seed: 0.5 * (1.05 if v == loss_parity.ADAPTIVELOAD else 1.0))
    assert judge(BY_ID["T5"], loss_parity.evidence(worse)[0])[0] == "not reproduced"
    noisy = rows(lambda v, seed: 0.5 * (1 + 0.1 * (-1) ** seed * (v == loss_parity.ADAPTIVELOAD)))
    assert judge(BY_ID["T5"], loss_parity.evidence(noisy)[0])[0] == "ambiguous"


def test_the_figure_has_a_point_a_seed_and_the_interval_that_judges():
    table = rows(lambda v, seed: 0.5 + 0.01 * seed * (v == loss_parity.ADAPTIVELOAD))
    with style.context():
        (figure,) = loss_parity.draw(table)
        bottom = figure.figure.axes[1]
        texts = [t.get_text() for t in bottom.get_yticklabels()]
        (procedural,) = loss_parity.draw(table[table["corpus"] == "moving-shapes"])
    assert "Open points" in figure.caption and "Open points" not in procedural.caption
    assert [t.startswith("real clips: ") and t.endswith("n = 3") for t in texts] == [False] * 5 + [True]
    at = next(k for k, text in enumerate(texts) if "dual constraint" in text and text.endswith("batch means; n = 6"))
    points = next(line for line in bottom.lines if list(line.get_ydata()) == [at] * 6)
    differences = loss_parity.differences(table, loss_parity.ADAPTIVELOAD)
    assert list(points.get_xdata()) == pytest.approx(list(differences))
    i = _campaign.interval(differences)
    (ends,) = bottom.containers[at].lines[2][0].get_segments()
    assert ends[:, 0] == pytest.approx([i.low, i.high]) and (i.low, i.high) == pytest.approx(
        (loss_parity.evidence(table)[0].ci_low, loss_parity.evidence(table)[0].ci_high)
    )


def test_a_smoke_run_learns():
    pytest.importorskip("torch")
    machine = read_machine(gpus=0)
    case = loss_parity.cases("smoke", machine)[0]
    found = {m.metric: m.value for m in loss_parity.measure(case, machine, pd.DataFrame())}
    assert found["loss_after"] < 0.98 * found["loss_before"]
    curve = [found[f"curve_at_{k}"] for k in range(loss_parity.BINS)]
    assert (
        np.isfinite(curve).all()
        and found["steps"] == loss_parity.SMOKE_EPOCHS * 2 * len(loss_parity.MIX) / loss_parity.RANKS
    )
