"""Shapes to tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.corpus import Corpus, Shape, Tokenizer


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        (Shape(1, 480, 832), 1_560),
        (Shape(1, 720, 1280), 3_600),
        (Shape(81, 480, 832), 32_760),
        (Shape(81, 720, 1280), 75_600),
    ],
)
def test_wan_sequence_lengths(shape: Shape, tokens: int) -> None:
    """Sequence lengths of Wan 2.1's own sizes: ((F - 1) / 4 + 1) * (H / 16) * (W / 16)."""
    assert Tokenizer().tokens(shape) == tokens


def test_strides_of_another_model() -> None:
    assert Tokenizer(vae_stride=(8, 32, 32), patch=(1, 1, 1)).tokens(Shape(17, 512, 768)) == 3 * 16 * 24


@pytest.mark.parametrize("shape", [Shape(0, 480, 832), Shape(4, 480, 832), Shape(1, 480, 830), Shape(1, 0, 832)])
def test_shapes_that_do_not_divide_are_refused_by_name(shape: Shape) -> None:
    with pytest.raises(ValueError, match=str(shape)):
        Tokenizer().tokens(shape)


@settings(derandomize=True, max_examples=50)
@given(st.integers(0, 40), st.integers(1, 80), st.integers(1, 80))
def test_tokens_are_the_product_of_the_patched_latent(k: int, h: int, w: int) -> None:
    shape = Shape(4 * k + 1, 16 * h, 16 * w)
    assert Tokenizer().latent(shape) == (k + 1, 2 * h, 2 * w)
    assert Tokenizer().tokens(shape) == (k + 1) * h * w


def test_corpus_counts_empty_buckets_too() -> None:
    shapes = (Shape(1, 16, 16), Shape(1, 16, 32), Shape(1, 32, 32))
    corpus = Corpus("x", "here", shapes, np.array([1, 2, 4]), np.array([0, 0, 1], dtype=np.int32))
    assert corpus.counts.tolist() == [2, 1, 0]
    assert corpus.samples == 3
