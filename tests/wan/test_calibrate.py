"""The sweep: which shapes, how much memory, and what happens when it runs out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.fit import FOLDS
from repro.balance.models import MODELS
from repro.corpus import mixes
from repro.corpus.shapes import Shape, Tokenizer
from repro.wan import calibrate
from repro.wan.batching import tiny_corpus
from repro.wan.calibrate import cases, find_m_mem, sweep_shapes
from repro.wan.parallel import leave
from repro.wan.sweep import Probe, Sweep
from tests.wan import ranks, sweep_ranks

tokens = Tokenizer().tokens


@pytest.mark.parametrize("name", ["wan-uniform", "worst-case", "koala-36m", "images", "tiny"])
def test_shapes_span_the_corpus_and_suffice_for_a_fit(name):
    corpus = tiny_corpus(50) if name == "tiny" else mixes.named(name, 500)
    shapes = sweep_shapes(corpus)
    lengths = [tokens(s) for s in shapes]
    assert lengths == sorted(set(lengths)) and FOLDS <= len(shapes) <= 8
    assert lengths[-1] == corpus.tokens.max()


def test_full_batches_and_single_samples_come_first():
    shapes = [Shape(1, 32, 32), Shape(5, 64, 64)]
    found = list(cases(shapes, 256))
    assert found[:4] == [(shapes[0], 64), (shapes[1], 8), (shapes[0], 1), (shapes[1], 1)]
    assert len(set(found)) == len(found) and all(b * tokens(s) <= 256 for s, b in found)


@given(
    fixed=st.integers(0, 10**9),
    per_token=st.integers(10_000, 2_000_000),
    per_sample=st.integers(0, 10**8),
    spare=st.floats(1.0, 50.0),
    bend=st.floats(0.0, 0.2),
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_m_mem_fits_and_is_close_to_the_most_that_does(fixed, per_token, per_sample, spare, bend):
    """Against memory that grows a little faster than in a line; nothing far beyond the budget is ever tried."""
    shapes = [Shape(1, 480, 832), Shape(81, 480, 832)]

    def peak(shape, batch):
        n = batch * tokens(shape)
        return round(fixed + (per_token * n + per_sample * batch) * (1 + bend * n / 1e6))

    tried = []

    def probe(shape, batch):
        tried.append((shape, batch))
        return Probe(shape, batch, 1.0, peak(shape, batch), True)

    budget = round(peak(shapes[-1], 1) * spare)
    short = tokens(shapes[0])
    alike = tokens(shapes[1]) // short
    try:
        found = find_m_mem(probe, shapes, budget, lambda line: None)
    except ValueError as error:
        assert f"{alike} of 1x480x832, as many tokens, do not" in str(error) and peak(shapes[0], alike) > budget
    else:
        fits = found // short
        assert peak(shapes[0], fits) <= budget
        assert peak(shapes[0], math.ceil((fits + 1) * (1 + calibrate.RESOLUTION))) > budget
    assert max(peak(*t) for t in tried) <= max(1.3 * budget, peak(shapes[0], tokens(shapes[1]) // short // 2))


def test_what_does_not_fit_at_all_is_said():
    shapes = [Shape(1, 32, 32), Shape(5, 64, 64)]

    def probe(shape, batch):
        return Probe(shape, batch, float("nan"), 10, False)

    with pytest.raises(ValueError, match="one sample of 5x64x64"):
        find_m_mem(probe, shapes, 100, lambda line: None)
    with pytest.raises(ValueError, match="give --m-mem"):
        find_m_mem(probe, shapes, None, lambda line: None)


def test_a_rank_that_runs_out_of_memory_alone_ends_with_the_cause(tmp_path):
    """Running out together is survived; alone it is not, but nobody waits for a collective that never comes."""
    ranks.run(sweep_ranks.out_of_memory, 2, str(tmp_path))
    assert "ran out of memory at 1x32x32 x 3, and 2 s later other ranks had not" in (tmp_path / "1").read_text()
    assert (tmp_path / "0").exists()


def test_room_is_kept_for_moments_and_for_gradients_of_earlier_micro_batches():
    ranks.run(sweep_ranks.memory_to_come, 2)


@given(
    seconds=st.floats(0.0, 1e4), alone=st.floats(0.01, 30.0), m_mem=st.integers(46_800, 2_000_000), few=st.booleans()
)
@settings(derandomize=True, max_examples=60, deadline=None)
def test_timed_batches_are_the_largest_that_the_time_allows(seconds, alone, m_mem, few):
    size, shapes = MODELS["wan-1.3b"], sweep_shapes(mixes.named("wan-uniform", 500))[:: 2 if few else 1]
    longest = tokens(shapes[-1])
    rate = alone / size.forward_flops(1, longest)

    def estimate(most):
        passes = [size.forward_flops(b, tokens(s)) for s in shapes for b in (max(1, most // tokens(s)), 1)]
        return 2 * rate * sum(map(float, passes))

    most = calibrate.affordable(size, shapes, m_mem, alone, seconds)
    assert longest <= most <= m_mem
    assert most == longest or estimate(most) <= seconds * (1 + 1e-9)
    assert most == m_mem or estimate(min(m_mem, 2 * most + 1)) > seconds * (1 - 1e-9)


@pytest.mark.parametrize(("seconds", "most"), [(10.01, 4), (9.99, 2), (6.01, 2), (5.99, 1)])
def test_the_time_of_a_shape_is_that_of_its_full_micro_batch_and_of_one_sample(seconds, most):
    """One sample takes a second: B of them and one alone, each with a pass to warm up, 2 (B + 1)."""
    shape = Shape(17, 480, 832)
    found = calibrate.affordable(MODELS["wan-1.3b"], [shape], 4 * tokens(shape), 1.0, seconds)
    assert found == most * tokens(shape)


def test_memory_alone_takes_one_pass_and_is_measured_again_for_time(tmp_path):
    memory = sweep_ranks.Memory()
    try:
        sweep = Sweep(memory.make, memory.world, tmp_path / "calibration.csv", "test")
        untimed = sweep.probe(Shape(1, 32, 32), 2, timed=False)
        assert untimed.fits and math.isnan(untimed.seconds) and untimed.passes == ()
        timed = sweep.probe(Shape(1, 32, 32), 2)
        assert timed.seconds > 0 and len(timed.passes) == 3
        assert sweep.probe(Shape(1, 32, 32), 2).seconds == timed.seconds and len(sweep.recorded()) == 2
    finally:
        leave()


def test_a_shapes_time_is_the_median_after_the_first_pass(monkeypatch):
    memory = sweep_ranks.Memory()
    try:
        sweep = Sweep(memory.make, memory.world)
        passes = iter([50.0, 0.25, 1.75, 0.5])
        monkeypatch.setattr(sweep, "_pass", lambda micro_batch, losses: next(passes))
        found = sweep.probe(Shape(1, 32, 32), 2)
        assert (found.seconds, found.passes) == (0.5, (0.25, 1.75, 0.5))
    finally:
        leave()


def test_running_out_of_memory_is_recorded_and_survived(tmp_path, monkeypatch):
    """Memory runs out in the middle of a backward pass; the engine made anew computes as the first did."""
    memory, path = sweep_ranks.Memory(), tmp_path / "calibration.csv"
    small, large = sweep_ranks.SMALL, sweep_ranks.LARGE
    try:
        sweep = Sweep(memory.make, memory.world, path, "test")
        assert sweep.probe(small, 2).fits
        memory.short = True
        failed = sweep.probe(large, 3)
        assert not failed.fits and math.isnan(failed.seconds)
        memory.short = False
        assert sweep.probe(large, 2).fits
        recalled = Sweep(memory.make, memory.world, path, "test")
        monkeypatch.setattr(recalled, "_measure", None)
        assert not recalled.probe(large, 3).fits and recalled.probe(large, 2) == sweep.probe(large, 2)
        assert recalled.ended is None
        sweep.end(512)
        assert Sweep(memory.make, memory.world, path, "test").ended == 512
    finally:
        leave()
