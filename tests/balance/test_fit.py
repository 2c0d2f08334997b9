"""Fits recover what made the data, hold lengths out, and compare AdaLNs through pairs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from repro.balance.cost import PowerCost, QuadraticCost, Range
from repro.balance.fit import (
    FOLDS,
    FORMS,
    Observations,
    fit,
    folds,
    measured_cost,
    observations,
    parameter_intervals,
    with_adaln,
)
from repro.balance.memory import fit_memory
from repro.records import Store

SHAPES = [(b, s) for s in (256, 1_024, 3_600, 7_800, 14_040, 20_280, 32_760) for b in (1, 2, 8, 64) if b * s <= 70_000]
BATCH, TOKENS = (np.array(x) for x in zip(*SHAPES, strict=True))
ABOUT = {"layers": 2, "measured_layers": 2, "range": Range.of(BATCH, TOKENS), "source": "r1"}
POWER = PowerCost(a=0.01, b=0.09, p=1.4, **ABOUT)
QUADRATIC = QuadraticCost(a=0.004, b=0.085, c=0.032, d=0.001, **ABOUT)


def observed(cost, noise=0.0, seed=0):
    factor = 1 + noise * np.random.default_rng(seed).standard_normal(BATCH.size)
    return Observations(
        BATCH, TOKENS, cost.seconds(BATCH, TOKENS) * factor, 2, np.ones(BATCH.size, dtype=bool), source="r1"
    )


@pytest.mark.parametrize(("form", "truth"), [("power", POWER), ("quadratic", QUADRATIC)])
def test_recovers_the_parameters(form, truth):
    found = fit(form, observed(truth))
    for name in parameter_intervals(form, observed(truth), resamples=2):
        assert getattr(found.cost, name) == pytest.approx(getattr(truth, name), rel=1e-4)
    assert found.mape < 1e-3
    assert found.held_out_mape < 1e-2
    assert found.cost.range == truth.range
    assert found.cost.source == "r1"


@pytest.mark.parametrize("form", FORMS)
def test_errors_follow_the_noise(form):
    found = fit(form, observed(QUADRATIC, noise=0.05))
    if form == "table":
        assert found.mape < 1e-6
    # mean |N(0, 5%)| is 4%; held out it is no smaller
    assert 2 < found.held_out_mape < (40 if form == "power" else 12)
    value, low, high = found.error(found.held_out)
    assert low <= value <= high


def test_an_error_s_interval_is_that_of_its_lengths():
    """By hand: errors of 10 and 14% at one length, 30% at another, 20% at a third: 18.5% of four shapes."""
    data = Observations(np.array([1, 2, 1, 1]), np.array([1, 1, 2, 3]), np.ones(4), 2, np.ones(4, bool), "r1")
    found = replace(fit("table", observed(QUADRATIC)), observations=data)
    apart = np.array([24 - 2 * 18.5, 30 - 18.5, 20 - 18.5])
    half = 4.302653 * np.sqrt(3 / 2 * np.sum(apart**2)) / 4  # Student's t, two degrees of freedom, 97.5%
    error = found.error(np.array([0.10, -0.14, 0.30, -0.20]))
    assert error == pytest.approx((18.5, max(0.0, 18.5 - half), 18.5 + half), rel=1e-6)
    one = replace(data, tokens=np.ones(4))
    assert replace(found, observations=one).error(np.full(4, 0.1)) == (pytest.approx(10), 0, np.inf)


def test_intervals_cover_the_truth():
    intervals = parameter_intervals("quadratic", observed(QUADRATIC, noise=0.02), resamples=60)
    # b and c rule the data; 2% noise over 24 shapes pins them to a few percent
    for name in ("b", "c"):
        value, low, high = intervals[name]
        assert low <= value <= high
        assert 0.9 * low <= getattr(QUADRATIC, name) <= 1.1 * high


def test_relative_error_weighs_short_and_long_alike():
    """Images 20% dearer than the form: a fit on absolute error would not notice them, this one has to give way."""
    data = observed(QUADRATIC)
    seconds = np.where(TOKENS <= 1_024, 1.2, 1.0) * data.seconds
    found = fit("quadratic", Observations(BATCH, TOKENS, seconds, 2, data.measured, "r1"))
    assert np.abs(found.residuals[TOKENS <= 1_024]).max() < 0.15


def test_folds_hold_out_whole_lengths_once():
    masks = list(folds(TOKENS))
    assert len(masks) == FOLDS
    assert (np.sum(masks, axis=0) == 1).all()
    for mask in masks:
        assert not set(TOKENS[mask]) & set(TOKENS[~mask])


def test_held_out_is_predicted_without_the_length():
    data = observed(QUADRATIC)
    seconds = np.where(TOKENS == 7_800, 2.0, 1.0) * data.seconds
    found = fit("table", Observations(BATCH, TOKENS, seconds, 2, data.measured, "r1"))
    assert np.abs(found.residuals).max() < 1e-9
    assert (found.held_out[TOKENS == 7_800] < -0.3).all()


def test_too_little_data_is_refused():
    data = observed(QUADRATIC)
    few = Observations(BATCH[:4], TOKENS[:4], data.seconds[:4], 2, data.measured[:4], "r1")
    with pytest.raises(ValueError, match="at least 5 lengths"):
        fit("power", few)
    with pytest.raises(ValueError, match="form must be one of"):
        fit("cubic", data)
    with pytest.raises(ValueError, match="positive"):
        Observations(BATCH, TOKENS, 0 * data.seconds, 2, data.measured, "r1")


def rows_of(times, adaln, layers=2, run="r1"):
    return pd.DataFrame(
        {"suite": "block_time", "metric": "forward_backward", "model": "wan-14b", "adaln": adaln, "layers": layers,
         "batch": [b for b, _ in times], "tokens": [s for _, s in times], "value": list(times.values()), "run_id": run}
    )  # fmt: skip


def test_reads_the_main_depth_in_seconds():
    times = {(b, s): 1e3 * float(QUADRATIC.seconds(b, s)) for b, s in SHAPES}
    deeper = dict(list(times.items())[:2])
    rows = pd.concat([rows_of(times, "eager"), rows_of(deeper, "eager", layers=6, run="r0")])
    data = observations(rows, "wan-14b", "eager")
    assert data.layers == 2
    assert data.source == "r1"
    np.testing.assert_allclose(data.seconds, QUADRATIC.seconds(data.batch, data.tokens))
    with pytest.raises(ValueError, match="no block_time rows of model 'wan-1"):
        observations(rows, "wan-1.3b", "eager")


def test_measured_cost_is_the_table_at_full_depth():
    times = {(b, s): 1e3 * float(QUADRATIC.seconds(b, s)) for b, s in SHAPES}
    cost = measured_cost(rows_of(times, "eager"), "wan-14b", "eager")
    assert cost.seconds(2, 7_800) == pytest.approx(20 * float(QUADRATIC.seconds(2, 7_800)))
    assert cost.kind == "simulated"


def test_other_adaln_is_completed_from_pairs():
    eager = observed(QUADRATIC, noise=0.05)
    saved = 0.0005 + 0.003 * BATCH * TOKENS / 1e4
    some = np.arange(0, BATCH.size, 3)
    fused = Observations(
        BATCH[some], TOKENS[some], (eager.seconds - saved)[some], 2, np.ones(some.size, dtype=bool), "r2"
    )
    both = with_adaln(eager, fused)
    # the noise of eager's times cancels: only its pairs are compared
    np.testing.assert_allclose(both.seconds, eager.seconds - saved, rtol=1e-9)
    assert both.measured.sum() == some.size
    assert both.source == "r1 r2"


def test_completing_needs_pairs():
    eager = observed(QUADRATIC)
    alone = Observations(BATCH[:2], TOKENS[:2], eager.seconds[:2], 2, eager.measured[:2], "r2")
    with pytest.raises(ValueError, match="at least three shapes"):
        with_adaln(eager, alone)


def test_error_counts_measured_shapes_only():
    eager = observed(QUADRATIC)
    some = np.arange(0, BATCH.size, 3)
    found = fit("power", with_adaln(eager, Observations(
        BATCH[some], TOKENS[some], eager.seconds[some], 2, np.ones(some.size, dtype=bool), "r2")))  # fmt: skip
    assert found.mape == pytest.approx(100 * np.abs(found.residuals[some]).mean())


def test_a_form_that_there_is_not_is_refused_on_every_way():
    rows = rows_of({(b, s): 1e3 * float(QUADRATIC.seconds(b, s)) for b, s in SHAPES}, "eager")
    for ask in (
        lambda: measured_cost(rows, "wan-14b", "eager", "linear"),
        lambda: parameter_intervals("linear", observed(QUADRATIC), resamples=2),
    ):
        with pytest.raises(ValueError, match="form must be one of power, quadratic, table, got 'linear'"):
            ask()


@pytest.mark.parametrize(
    ("model", "adaln", "told"),
    [
        ("wan14b", "fused", "no model 'wan14b'; nearest: wan-14b, wan-1.3b"),
        ("wan-14b", "fused2", "no measured AdaLN 'fused2'; nearest: fused"),
        ("wan-14b", "nothing", "no measured AdaLN 'nothing'; known: eager, fused"),
    ],
)
def test_names_are_checked_before_rows_are_read(model, adaln, told):
    times = {(b, s): 1e3 * float(QUADRATIC.seconds(b, s)) for b, s in SHAPES}
    rows = pd.concat([rows_of(times, "eager"), rows_of(times, "fused")])
    with pytest.raises(ValueError, match=f"^{told}$"):
        measured_cost(rows, model, adaln)


def test_what_is_compared_with_eager_needs_eager():
    rows = rows_of({(b, s): 1e3 * float(QUADRATIC.seconds(b, s)) for b, s in SHAPES}, "fused")
    with pytest.raises(
        ValueError, match="AdaLN 'fused' is compared with 'eager', of which model 'wan-14b' has no rows"
    ):
        observations(rows, "wan-14b", "fused")


def test_rows_of_a_folder_or_device_without_any_say_what_to_do(tmp_path):
    other = rows_of({(1, 256): 1.0}, "eager").assign(suite="kernel_speed").drop(columns="model")
    for rows in (Store(tmp_path).rows("block_time", "nvidia-h200", "full"), pd.DataFrame(), other):
        for read in (measured_cost, fit_memory):
            with pytest.raises(ValueError, match="no rows of block_time or shape_sweep: check the folder of results"):
                read(rows, "wan-14b", "eager")
