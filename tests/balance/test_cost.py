"""Cost forms: values, ranges, refusal, depth; and a published batch table that equal cost predicts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.cost import (
    ExtrapolationError,
    PowerCost,
    QuadraticCost,
    Range,
    TableCost,
    reference_wan14b,
)
from repro.balance.policies import EqualTime

RANGE = Range((256, 65_536), 70_000)
COMMON = {"layers": 3, "measured_layers": 3, "range": RANGE, "source": "made up"}
QUADRATIC = QuadraticCost(a=0.005, b=0.13, c=0.05, d=0.001, **COMMON)
SHAPES = sorted(
    {(b, s) for s in (256, 1_024, 7_800, 32_760, 65_536) for b in (1, 2, 4, 70_000 // s) if b * s <= 70_000}
)


def table(factor=1.0, base=QUADRATIC):
    batch, tokens = (tuple(x) for x in zip(*SHAPES, strict=True))
    seconds = tuple((factor * QUADRATIC.seconds(batch, tokens)).tolist())
    return TableCost(
        base=base, batch=batch, tokens=tokens, measured_seconds=seconds, **COMMON | {"range": Range.of(batch, tokens)}
    )


def test_power_in_the_paper_form():
    cost = PowerCost(a=0.01, b=0.2, p=1.5, **COMMON)
    assert cost.seconds(3, 20_000) == pytest.approx(0.01 + 0.2 * 3 * 2**1.5)


def test_quadratic_counts_each_sample():
    assert QUADRATIC.seconds(3, 20_000) == pytest.approx(0.005 + 3 * (0.13 * 2 + 0.05 * 4 + 0.001))


def test_reference_is_the_published_formula():
    b, s = 2, 32_760
    milliseconds = 40 / 3 * (5.7 + 127.6 * b * s / 1e4 + 47.75 * b * s * s / 1e8)
    assert reference_wan14b().seconds(b, s) == pytest.approx(milliseconds / 1e3)
    assert reference_wan14b().kind == "simulated"


@pytest.mark.parametrize("cost", [PowerCost(a=0.01, b=0.2, p=1.5, **COMMON), QUADRATIC, table()])
def test_broadcasts_and_scales_with_depth(cost):
    batch, tokens = np.array([[1], [2]]), np.array([256, 1_024, 7_800])
    seconds = cost.seconds(batch, tokens)
    assert seconds.shape == (2, 3)
    assert seconds[1, 2] == pytest.approx(float(cost.seconds(2, 7_800)))
    assert cost.seconds(1, 256).shape == ()
    deep = cost.scaled(12)
    np.testing.assert_allclose(deep.seconds(batch, tokens), 4 * seconds)
    assert (cost.kind, deep.kind) == ("measured", "simulated")
    assert deep.scaled(3) == cost


@pytest.mark.parametrize("cost", [PowerCost(a=0.01, b=0.2, p=1.5, **COMMON), QUADRATIC, table()])
@pytest.mark.parametrize("shape", [(1, 255), (1, 65_537), (3, 32_760)])
def test_refuses_to_extrapolate_unless_asked(cost, shape):
    with pytest.raises(ExtrapolationError, match=r"outside what was measured .*extrapolating\(\)"):
        cost.seconds([1, shape[0]], [256, shape[1]])
    asked = cost.extrapolating()
    assert asked.seconds(*shape) > 0
    assert asked.kind == "simulated"


@pytest.mark.parametrize(("batch", "tokens"), [(0, 256), (1, 0), (-1, 256), (float("nan"), 256)])
def test_nonsense_sizes_are_refused(batch, tokens):
    with pytest.raises(ValueError, match="at least 1"):
        QUADRATIC.extrapolating().seconds(batch, tokens)


def test_depth_and_range_are_checked():
    with pytest.raises(ValueError, match="layers must be at least 1"):
        QUADRATIC.scaled(0)
    with pytest.raises(ValueError, match="shortest <= longest"):
        Range((512, 256), 70_000)


def test_table_gives_back_what_was_measured():
    noisy = table(np.random.default_rng(0).uniform(0.8, 1.3, len(SHAPES)))
    batch, tokens = zip(*SHAPES, strict=True)
    np.testing.assert_allclose(noisy.seconds(batch, tokens), noisy.measured_seconds, rtol=1e-9)


@given(
    tokens=st.integers(256, 65_536),
    filled=st.floats(0, 1),
)
@settings(derandomize=True, max_examples=50, deadline=None)
def test_table_keeps_the_curvature_between_shapes(tokens, filled):
    # Measured times 10% above the form everywhere: interpolation must be 10% above it everywhere, not chords.
    batch = max(1, int(filled * 65_000 / tokens))
    assert table(1.1).seconds(batch, tokens) == pytest.approx(1.1 * float(QUADRATIC.seconds(batch, tokens)), rel=1e-9)


def test_table_stays_between_its_neighbours_corrections():
    factors = np.where(np.array([s for _, s in SHAPES]) == 7_800, 1.2, 1.0)
    ratio = table(factors).seconds(1, 4_000) / QUADRATIC.seconds(1, 4_000)
    assert 1.0 < ratio < 1.2


def test_table_needs_shapes_that_span_batch_and_tokens():
    line = {"batch": (1, 1, 1), "tokens": (256, 512, 1024), "measured_seconds": (1.0, 1.0, 1.0)}
    with pytest.raises(ValueError, match="span batch and tokens"):
        TableCost(base=QUADRATIC, **line, **COMMON)
    twice = {"batch": (1, 2, 1), "tokens": (256, 256, 256), "measured_seconds": (1.0, 1.0, 1.0)}
    with pytest.raises(ValueError, match="one time for each shape"):
        TableCost(base=QUADRATIC, **twice, **COMMON)


# Open-Sora 2.0, stage 1 on H200, tuned by hand: hpcaitech/Open-Sora, docs/train.md. Tokens: 256 px clips of 1, 33, 65,
# 97, 129 frames (VAE 4 x 8 x 8, patch 2 x 2: 256 a latent frame), then images of 768 and 1024 px.
OPEN_SORA_2_STAGE_1 = {(1, 256): 45, (33, 2_304): 12, (65, 4_352): 6, (97, 6_400): 4, (129, 8_448): 3,
                       (1, 2_304): 13, (1, 4_096): 7}  # fmt: skip


def test_equal_cost_predicts_a_table_that_was_tuned_by_hand():
    """Flux's MMDiT, text and video attending jointly: 24 d^2 FLOPs a token and block, 4 d (S + T)^2 attention.

    With T = 512 text tokens and d = 3072, FLOPs are in proportion to (S + T) (6 d + S + T): linear, quadratic and
    per-sample terms in S. The one published number used is the batch size of the longest bucket.
    """
    d, text, unit = 3_072, 512, 1e4
    flops = QuadraticCost(
        a=0.0,
        b=(6 * d + 2 * text) * unit,
        c=unit**2,
        d=text * (6 * d + text),
        layers=1,
        measured_layers=1,
        range=Range((256, 8_448), 45_000),
        source="FLOPs",
    )
    tokens = np.array([s for _, s in OPEN_SORA_2_STAGE_1])
    published = np.array(list(OPEN_SORA_2_STAGE_1.values()))
    longest = int(tokens.max())
    target = float(flops.seconds(published[tokens == longest][0], longest))
    predicted = EqualTime(m_mem=45_000, cost=flops, target=target).batch_sizes(tokens)
    assert (np.abs(predicted - published) <= 1).sum() >= 6, dict(zip(tokens.tolist(), predicted.tolist(), strict=True))
    # Without the text, images come out far too large a batch: the term earns its place.
    without = QuadraticCost(
        a=0.0, b=6 * d * unit, c=unit**2, layers=1, measured_layers=1, range=Range((256, 8_448), 10**6), source="FLOPs"
    )
    target = float(without.seconds(3, longest))
    assert EqualTime(10**6, without, target).batch_sizes(256) > 2 * 45
