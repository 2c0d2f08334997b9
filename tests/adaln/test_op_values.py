"""Values: the op against float64, over shapes, dtypes, strides and statistics."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.adaln import composite, get_impl, layer_norm_modulate
from tests.adaln import op_cases
from tests.adaln.op_cases import (
    BARS,
    DTYPES,
    HALF,
    LAYOUTS,
    assert_close,
    assert_same_bits,
    differentiate,
    error,
    exact,
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 96, 1536), (3, 17, 1000), (40, 264)], ids=str)
def test_against_float64(device, impl, dtype, shape):
    inputs = op_cases.make(shape, device, dtype)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert_close(got, exact(inputs), BARS[dtype])
    assert [t.dtype for t in got] == [dtype] * 4


@pytest.mark.parametrize("dtype", HALF)
def test_no_less_accurate_than_eager(device, impl, dtype):
    inputs = op_cases.make((2, 256, 1536), device, dtype)
    want = exact(inputs)
    ours = differentiate(layer_norm_modulate, inputs, impl=impl)
    eager = differentiate(get_impl("eager"), inputs)
    for name, a, b, w in zip(want._fields, ours, eager, want, strict=True):
        assert error(a, w) <= 1.05 * error(b, w), f"{name} is less accurate than eager"


def test_mean_far_above_spread(device, impl):
    """E[x^2] - mean^2 in float32 would leave nothing of a variance of 1 under a mean of 1e4 (its bar: 2e-3)."""
    inputs = op_cases.make((2, 64, 1536), device, mean=1e4)
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), (2e-3, 2e-3))


@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 64, 1536)], ids=str)
def test_composite_under_a_mean_of_a_million(shape):
    """Float32 leaves 1/16 between neighbours there, and a mean rounded to it would put up to 3e-2 on every y.

    x - mean has no such error once the mean of the differences is taken off, so y keeps its usual bar. mean itself
    is right to a rounding of its own and one of the sum's; the backward, which starts from it, is off by as much.
    """
    inputs = op_cases.make(shape, mean=1e6)
    y, (mean, rstd) = composite.forward(inputs.x, inputs.shift, inputs.scale, 1e-6, None)
    x_rows = inputs.x.double().flatten(0, 1)
    assert error(y, exact(inputs).y) <= BARS[torch.float32][0]
    assert error(rstd, (x_rows.var(-1, correction=0) + 1e-6).rsqrt()) <= BARS[torch.float32][0]
    assert float((mean.double() - x_rows.mean(-1)).abs().max()) <= 1 / 16


@pytest.mark.parametrize("dim", [1, 3, 7, 1000])
def test_odd_dims(device, impl, dim):
    """Small D is badly conditioned (rows of nearly equal features, dx nearly all cancelled): a looser bar."""
    inputs = op_cases.make((2, 33, dim), device)
    bars = (1e-6, 1e-5) if dim > 7 else (2e-5, 2e-5)
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), bars)


def test_one_feature_is_shift_alone(device, impl):
    inputs = op_cases.make((2, 5, 1), device)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert torch.equal(got.y, inputs.shift.unsqueeze(1).expand(2, 5, 1))
    assert not got.dx.any() and not got.dscale.any()


@pytest.mark.parametrize("shape", [(1, 1, 1536), (1, 40), (1, 1, 1)], ids=str)
def test_one_row(device, impl, shape):
    inputs = op_cases.make(shape, device)
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), BARS[torch.float32])


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (0, 0, 8), (0, 8)], ids=str)
def test_empty(device, impl, shape):
    inputs = op_cases.make(shape, device)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert got.y.shape == got.dx.shape == shape
    assert got.dshift.shape == got.dscale.shape == inputs.scale.shape
    assert not got.dshift.any() and not got.dscale.any(), "a sum over no rows is zero"


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(DTYPES, repeat=3)), ids=lambda d: "-".join(str(t)[6:] for t in d)
)
def test_mixed_modulation(device, impl, dtypes):
    """x, shift and scale each in its own dtype: y and dx come in x's, dshift in shift's, dscale in scale's."""
    x_dtype, shift_dtype, scale_dtype = dtypes
    inputs = op_cases.make((2, 24, 264), device, x_dtype, modulation=(shift_dtype, scale_dtype))
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert [t.dtype for t in got] == [x_dtype, x_dtype, shift_dtype, scale_dtype]
    for name, g, w in zip(got._fields, got, exact(inputs), strict=True):
        assert error(g, w) <= BARS[g.dtype][name in ("dshift", "dscale")], name


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_dtype(device, impl, dtype, out_dtype):
    inputs = op_cases.make((2, 24, 264), device, dtype, out_dtype=out_dtype)
    got = differentiate(layer_norm_modulate, inputs, impl=impl, out_dtype=out_dtype)
    want = exact(inputs)
    assert got.y.dtype == out_dtype and error(got.y, want.y) <= BARS[out_dtype][0], "rounded once, at the end"
    assert got.dx.dtype == dtype and error(got.dx, want.dx) <= BARS[dtype][0]


def test_eps(device, impl):
    """eps counts where the variance is small."""
    inputs = op_cases.make((2, 8, 64), device)
    inputs = inputs._replace(x=inputs.x * 1e-3)
    assert_close(differentiate(layer_norm_modulate, inputs, eps=1e-2, impl=impl), exact(inputs, eps=1e-2), (1e-6, 1e-5))


@pytest.mark.parametrize("dy_layout", LAYOUTS)
@pytest.mark.parametrize("x_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_of_x_and_dy(device, impl, dtype, x_layout, dy_layout):
    inputs = op_cases.make((2, 9, 64), device, dtype)
    inputs = inputs._replace(x=LAYOUTS[x_layout](inputs.x), dy=LAYOUTS[dy_layout](inputs.dy))
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert got.y.is_contiguous() and got.dx.is_contiguous()
    assert_close(got, exact(inputs), BARS[dtype])


def test_expanded_x_and_dy(device, impl):
    """Stride 0: one sample's rows for all samples, and the gradient of a sum."""
    inputs = op_cases.make((2, 9, 64), device)
    x, dy = inputs.x[:1].expand(2, 9, 64), torch.ones((), device=device).expand(2, 9, 64)
    inputs = inputs._replace(x=x, dy=dy)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    # dshift counts rows: exact. dx is what rounding leaves of a sum that cancels less than usual.
    assert torch.equal(got.dshift, torch.full_like(got.dshift, 9))
    assert_close(got, exact(inputs), (2e-6, 1e-5))


@pytest.mark.parametrize("form", ["chunk", "chunk_flat", "every_other", "expanded"])
def test_strides_of_shift_and_scale(device, impl, form):
    batch, rows, dim = 3, 9, 64
    inputs = op_cases.make((batch, rows, dim), device)
    table = torch.randn(batch, 6, dim, generator=torch.Generator().manual_seed(1)).to(device)
    match form:
        case "chunk":
            shift, scale, *_ = table.chunk(6, dim=1)
        case "chunk_flat":
            shift, scale, *_ = table.view(batch, 6 * dim).chunk(6, dim=1)
        case "every_other":
            shift, scale = table[:, 0, :].repeat(1, 2)[:, ::2], table[:, 1, :].repeat(1, 2)[:, ::2]
        case "expanded":
            shift, scale = table[:1, 0].expand(batch, dim), table[:1, 1].expand(batch, dim)
    assert form == "chunk_flat" or not shift.is_contiguous() or batch == 1
    inputs = inputs._replace(shift=shift, scale=scale)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert got.dshift.shape == shift.shape and got.dscale.shape == scale.shape
    assert_close(got, exact(inputs), BARS[torch.float32])


def test_a_token_s_scale_of_a_length_that_no_bulk_copy_takes(device, impl):
    """20 bfloat16 features are 40 bytes, in rows 48 bytes apart: 16-byte loads could take them, 16-byte copies not."""
    inputs = op_cases.make((2, 9, 20), device)
    shift, scale = torch.randn(2, 2, 9, 24, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    inputs = inputs._replace(shift=shift[..., :20], scale=scale[..., :20])
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert_close(got, exact(inputs), BARS[torch.bfloat16])


def test_gradient_reaches_a_chunked_table(device, impl):
    inputs = op_cases.make((2, 9, 64), device)
    table = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    shift, scale, *_ = table.chunk(6, dim=1)
    (grad,) = torch.autograd.grad(layer_norm_modulate(inputs.x, shift, scale, impl=impl), table, inputs.dy)
    want = exact(inputs._replace(shift=shift.detach(), scale=scale.detach()))
    assert error(grad[:, 0:1], want.dshift) <= 1e-5 and error(grad[:, 1:2], want.dscale) <= 1e-5
    assert not grad[:, 2:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_sample_without_batch_dimension(device, impl, dtype):
    inputs = op_cases.make((20, 72), device, dtype)
    flat = differentiate(layer_norm_modulate, inputs, impl=impl)
    for expand in (lambda t: t.unsqueeze(0), lambda t: t):
        batched = op_cases.Inputs(inputs.x, expand(inputs.shift), expand(inputs.scale), inputs.dy)
        again = differentiate(layer_norm_modulate, batched, impl=impl)
        assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(flat, again, strict=True))


@pytest.mark.parametrize("shape", [(2, 300, 264), (1, 65, 1001)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_repeatable(device, impl, dtype, shape):
    inputs = op_cases.make(shape, device, dtype)
    first = differentiate(layer_norm_modulate, inputs, impl=impl)
    for _ in range(3):
        assert_same_bits(differentiate(layer_norm_modulate, inputs, impl=impl), first)


@pytest.mark.parametrize("shape", [(2, 37, 264), (1, 5, 1001), (3, 1, 8)], ids=str)
def test_every_output_element_is_written(device, impl, shape):
    inputs = op_cases.make(shape, device)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert all(t.isfinite().all() for t in got)
    assert_close(got, exact(inputs), BARS[torch.float32])


def test_composite_in_chunks_of_rows(monkeypatch):
    """The composite bounds its temporaries; the answer is that of one chunk up to the order of sums."""
    inputs = op_cases.make((2, 37, 64))
    whole = differentiate(layer_norm_modulate, inputs)
    monkeypatch.setattr(composite, "_CHUNK", 5 * 2 * 64)
    chunked = differentiate(layer_norm_modulate, inputs)
    assert torch.equal(whole.y, chunked.y) and torch.equal(whole.dx, chunked.dx)
    assert_close(chunked, exact(inputs), BARS[torch.float32])


def test_inputs_are_left_alone(device, impl):
    inputs = op_cases.make((2, 9, 64), device)
    before = [t.clone() for t in inputs]
    differentiate(layer_norm_modulate, inputs, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    batch=st.integers(1, 4),
    rows=st.integers(1, 40),
    dim=st.integers(8, 300),
    dtype=st.sampled_from(DTYPES),
    x_layout=st.sampled_from(sorted(LAYOUTS)),
    seed=st.integers(0, 2**16),
)
def _any_shape(device, impl, batch, rows, dim, dtype, x_layout, seed):
    inputs = op_cases.make((batch, rows, dim), device, dtype, seed=seed)
    inputs = inputs._replace(x=LAYOUTS[x_layout](inputs.x))
    # Twice the bars: they are for sizes at which errors average out.
    bars = tuple(2 * bar for bar in BARS[dtype])
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), bars)


def test_any_shape(device, impl):
    _any_shape(device, impl)
