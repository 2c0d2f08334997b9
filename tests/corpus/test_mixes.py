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


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(KeyError, match="did you mean wan-uniform"):
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
