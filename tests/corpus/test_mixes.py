"""Named corpora: exact shares, determinism, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.corpus import Shape, mixes


def test_wan_uniform_shapes_tokens_and_shares() -> None:
    corpus = mixes.named("wan-uniform", samples=60)
    assert corpus.tokens.tolist() == [1560, 7800, 14040, 20280, 26520, 32760, 3600, 18000, 32400, 46800]
    assert corpus.counts.tolist() == [30, 6, 3, 2, 1, 1, 13, 2, 1, 1]
    assert corpus.shapes[5] == Shape(81, 480, 832)


@pytest.mark.parametrize("name", mixes.names())
def test_same_arguments_same_corpus(name: str) -> None:
    a, b, other = (mixes.named(name, samples=500, seed=s) for s in (3, 3, 4))
    assert np.array_equal(a.bucket_of, b.bucket_of)
    assert np.array_equal(a.counts, other.counts)
    assert len(a.shapes) == 1 or not np.array_equal(a.bucket_of, other.bucket_of)
    assert a.bucket_of.dtype == np.int32 and a.tokens.dtype == np.int64


def test_all_names_have_a_summary_a_source_and_an_assumption() -> None:
    assert set(mixes.names()) == {
        "wan-uniform",
        "opensora-1.1",
        "opensora-1.2",
        "koala-36m",
        "knapformer-32",
        "wan-curriculum",
        "images",
        "worst-case",
    }
    for name, summary in mixes.summaries().items():
        chosen = mixes.mix(name)
        assert chosen.name == name and summary and chosen.source and chosen.assumptions


@pytest.mark.parametrize("name", mixes.names())
def test_every_bucket_fits_the_token_budget(name: str) -> None:
    """So that every policy can run every corpus at the budget of the equal-token baseline."""
    assert mixes.named(name, samples=10).tokens.max() <= mixes.TOKEN_BUDGET


def test_opensora_1_1_keeps_the_published_percentiles() -> None:
    """Published clip lengths, frames p5/10/25/50/75/90/95: 57 / 64 / 78 / 118 / 197 / 319 / 399."""
    corpus = mixes.named("opensora-1.1", samples=200_000)
    frames = np.array([s.frames for s in corpus.shapes])[corpus.bucket_of]
    assert np.mean(frames == 1) == pytest.approx(2.6 / 12.3, abs=1e-4)
    videos = frames[frames > 1]
    for q, published in ((5, 57), (10, 64), (25, 78), (50, 118), (75, 197), (90, 319), (95, 399)):
        assert published - 16 <= np.percentile(videos, q) <= published  # a bucket is at most 16 frames below the clip


def test_opensora_1_2_keeps_the_published_classes() -> None:
    corpus = mixes.named("opensora-1.2", samples=100_000)
    frames = np.array([s.frames for s in corpus.shapes])[corpus.bucket_of]
    under_5, under_10 = np.mean(frames < 80), np.mean(frames < 160)
    assert under_5 == pytest.approx(0.431, abs=0.01)
    # The bucket of 145 frames reaches to 160, that is 10 s; half a step of the quadrature.
    assert under_10 == pytest.approx(0.431 + 0.272, abs=0.01)
    short_and_small = [s.frames <= 49 and s.height < 720 for s in corpus.shapes]
    assert corpus.counts[short_and_small].sum() / np.sum(frames <= 49) == pytest.approx(0.01, abs=1e-3)


def test_koala_keeps_its_mean_until_clips_are_trimmed() -> None:
    chosen = mixes.mix("koala-36m")
    seconds = np.array([s.frames for s in chosen.shapes]) / 16
    mean = np.average(seconds, weights=chosen.weights)
    # Buckets lose up to a second, half of one on average; the 12% beyond 31 s lose the rest.
    assert 13.5 < mean < 17.2


def test_knapformer_counts_a_step() -> None:
    corpus = mixes.named("knapformer-32", samples=89)
    assert corpus.counts.tolist() == [32, 10, 10, 4, 10, 3, 16, 4]


def test_worst_case_is_one_long_micro_batch_in_six_and_near_the_minimum() -> None:
    corpus = mixes.named("worst-case", samples=151)
    assert corpus.counts.tolist() == [150, 1]  # five micro-batches of 30 images, one of a single clip
    # 14B on H200, milliseconds: (40 / 3) (5.7 + 127.6 B S / 1e4 + 47.75 B S^2 / 1e8)
    batch, tokens = np.array([30, 1]), corpus.tokens
    short, long = 5.7 + 127.6 * batch * tokens / 1e4 + 47.75 * batch * tokens.astype(float) ** 2 / 1e8
    k = long / short
    q = np.linspace(0.01, 0.9, 500)
    for ranks in (8, 16):
        working = (1 + q * (k - 1)) / (1 + (1 - (1 - q) ** ranks) * (k - 1))
        ours = (1 + (k - 1) / 6) / (1 + (1 - (5 / 6) ** ranks) * (k - 1))
        assert ours <= working.min() * 1.02


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(KeyError, match="no corpus 'wan_unifrom'; nearest: wan-uniform"):
        mixes.named("wan_unifrom")


def test_zero_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="samples=0"):
        mixes.named("wan-uniform", samples=0)


@settings(derandomize=True, max_examples=100)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.integers(0, 10_000))
def test_apportionment_is_exact_and_within_one_of_the_quota(weights: list[float], total: int) -> None:
    counts = mixes.apportion(weights, total)
    assert counts.sum() == total
    quota = np.array(weights) / np.sum(weights) * total
    assert np.all(np.abs(counts - quota) < 1 + 1e-6)  # rounding of the quota itself
    up = counts > quota
    if up.any() and not up.all():
        assert np.min((quota - np.floor(quota))[up]) >= np.max((quota - np.floor(quota))[~up]) - 1e-6
