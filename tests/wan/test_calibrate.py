"""The sweep: which shapes, how much memory, and what happens when it runs out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.fit import FOLDS
from repro.corpus import mixes
from repro.corpus.shapes import Shape, Tokenizer
from repro.wan import calibrate
from repro.wan.batching import tiny_corpus
from repro.wan.calibrate import Probe, Sweep, cases, find_m_mem, sweep_shapes
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.parallel import Parallelism, join, leave
from tests.wan.gradient_ranks import wan

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
    found = find_m_mem(probe, shapes, budget, lambda line: None)
    short = tokens(shapes[0])
    if peak(shapes[0], tokens(shapes[1]) // short // 2) <= budget:
        fits = found // short
        assert found == tokens(shapes[1]) or peak(shapes[0], fits) <= budget
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


def test_running_out_of_memory_is_recorded_and_survived(tmp_path, monkeypatch):
    """Memory runs out in the middle of a backward pass; the engine made anew computes as the first did."""
    world, subject = join("cpu"), wan()
    small, large = Shape(1, 32, 32), Shape(5, 32, 48)
    failing = False

    def fail(gradient):
        if failing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def make():
        model = subject.make(torch.float32)
        model.patch_embedding.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        return Engine(model, subject.losses, Parallelism(compute="master"), OptimizerSettings(), world)

    try:
        sweep = Sweep(make, world, tmp_path / "calibration.csv", "test")
        assert sweep.probe(small, 2).fits
        failing = True
        failed = sweep.probe(large, 3)
        assert not failed.fits and math.isnan(failed.seconds)
        failing = False
        assert sweep.probe(large, 2).fits
        recalled = Sweep(make, world, tmp_path / "calibration.csv", "test")
        monkeypatch.setattr(recalled, "_measure", None)
        assert not recalled.probe(large, 3).fits and recalled.probe(large, 2) == sweep.probe(large, 2)
        assert recalled.ended is None
        sweep.end(512)
        assert Sweep(make, world, tmp_path / "calibration.csv", "test").ended == 512
    finally:
        leave()
