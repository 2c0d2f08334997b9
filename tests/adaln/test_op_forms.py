"""Forms of modulation: per token and per frame against float64, and against the per-sample form where they meet."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.adaln import get_impl, layer_norm_modulate
from repro.adaln.form import Form, form_of
from tests.adaln import op_cases
from tests.adaln.op_cases import (
    BARS,
    DTYPES,
    FORMS,
    LAYOUTS,
    assert_close,
    assert_close_by_dtype,
    assert_same_bits,
    differentiate,
    exact,
)

SEVERAL = FORMS[1:]


@pytest.mark.parametrize(
    ("x", "modulation", "form"),
    [
        ((2, 6, 8), (2, 8), Form(2, 6, False)),
        ((2, 6, 8), (2, 1, 8), Form(2, 6, False)),
        ((2, 6, 8), (2, 6, 8), Form(2, 6, True)),
        ((2, 6, 8), (2, 3, 1, 8), Form(6, 2, False)),
        ((2, 6, 8), (2, 6, 1, 8), Form(12, 1, False)),
        ((6, 8), (8,), Form(1, 6, False)),
        ((6, 8), (6, 8), Form(1, 6, True)),
        ((6, 8), (3, 1, 8), Form(3, 2, False)),
        ((2, 1, 8), (2, 1, 8), Form(2, 1, False)),
        ((1, 8), (1, 8), Form(1, 1, False)),
        ((2, 0, 8), (2, 0, 8), Form(2, 0, True)),
        ((2, 0, 8), (2, 3, 1, 8), Form(6, 0, False)),
        ((2, 6, 8), (2, 3, 8), None),
        ((2, 6, 8), (2, 4, 1, 8), None),
        ((2, 6, 8), (2, 0, 1, 8), None),
        ((2, 6, 8), (3, 8), None),
        ((2, 6, 8), (2, 7), None),
        ((2, 6, 8), (), None),
        ((8,), (8,), None),
    ],
)
def test_form_is_told_by_shape(x, modulation, form):
    assert form_of(torch.empty(x, device="meta"), torch.empty(modulation, device="meta")) == form


@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 20, 1536), (3, 6, 1000), (2, 6, 7), (40, 264), (1, 1, 64)], ids=str)
def test_against_float64(device, impl, form, dtype, shape):
    inputs = op_cases.make(shape, device, dtype, form=form)
    bars = BARS[dtype] if shape[-1] > 7 else tuple(20 * b for b in BARS[dtype])  # few features cancel most of dx
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), bars)


@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize(
    ("dtype", "modulation", "out_dtype"),
    [
        (torch.float32, (torch.float32, torch.float32), torch.bfloat16),
        (torch.bfloat16, (torch.float32, torch.float32), torch.bfloat16),
        (torch.bfloat16, (torch.float16, torch.float32), torch.float32),
        (torch.float16, (torch.bfloat16, torch.float16), torch.bfloat16),
    ],
    ids=str,
)
def test_mixed_dtypes(device, impl, form, dtype, modulation, out_dtype):
    """dshift per token is dy, rounded to shift's dtype."""
    inputs = op_cases.make((2, 6, 264), device, dtype, modulation, out_dtype, form=form)
    got = differentiate(layer_norm_modulate, inputs, impl=impl, out_dtype=out_dtype)
    assert [t.dtype for t in got] == [out_dtype, dtype, *modulation]
    assert_close_by_dtype(got, exact(inputs))
    if form == "per_token":
        assert torch.equal(got.dshift, inputs.dy.to(modulation[0]))


@pytest.mark.parametrize("frames", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("samples", [(), (1,), (3,)], ids=str)
def test_frames_are_samples_of_their_own(device, impl, samples, frames):
    """Bit for bit: frames become samples and nothing is computed anew."""
    inputs = op_cases.make((*samples, 12, 72), device, form="per_frame", frames=frames)
    alone = op_cases.Inputs(
        inputs.x.view(-1, 12 // frames, 72),
        inputs.shift.view(-1, 72),
        inputs.scale.view(-1, 72),
        inputs.dy.view(-1, 12 // frames, 72),
    )
    got, want = (differentiate(layer_norm_modulate, i, impl=impl) for i in (inputs, alone))
    assert got.dscale.shape == got.dshift.shape == inputs.scale.shape
    assert_same_bits(got, op_cases.Results(*(w.view(g.shape) for g, w in zip(got, want, strict=True))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_per_token_with_equal_rows_is_per_sample(device, impl, dtype):
    """The same y and dx bit for bit; gradients of the modulation add up to the sample's."""
    one = op_cases.make((2, 24, 264), device, dtype)
    every = one._replace(
        shift=one.shift[:, None].expand(2, 24, 264).contiguous(), scale=one.scale[:, None].expand(2, 24, 264)
    )
    sample, token = (differentiate(layer_norm_modulate, i, impl=impl) for i in (one, every))
    assert torch.equal(sample.y, token.y)
    bars = BARS[dtype]
    assert op_cases.error(token.dx, sample.dx) <= bars[0]
    for name in ("dshift", "dscale"):
        summed = getattr(token, name).double().sum(1)
        assert op_cases.error(getattr(sample, name), summed) <= bars[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "dy", "shift", "scale"])
def test_strides(device, impl, form, layout, which):
    inputs = op_cases.make((2, 6, 64), device, form=form)
    tensor = getattr(inputs, which)
    if form == "per_sample" and which in ("shift", "scale") and layout == "batch_inside":
        pytest.skip("[B, D] has no second sample axis")
    inputs = inputs._replace(**{which: LAYOUTS[layout](tensor)})
    assert torch.equal(getattr(inputs, which), tensor)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert got.y.is_contiguous() and got.dx.is_contiguous()
    assert_close(got, exact(inputs), BARS[torch.float32])


@pytest.mark.parametrize("form", SEVERAL)
def test_chunks_of_a_table(device, impl, form):
    """Wan 2.2: [B, N, 6, D] per token; [B, F, 6, D] per frame. Gradients reach the table."""
    batch, rows, frames, dim = 2, 6, 3, 64
    inputs = op_cases.make((batch, rows, dim), device)
    generator = torch.Generator().manual_seed(1)
    length = rows if form == "per_token" else frames
    table = torch.randn(batch, length, 6, dim, generator=generator).to(device).requires_grad_()
    shift, scale, *_ = (t.squeeze(2) if form == "per_token" else t for t in table.chunk(6, dim=2))
    (grad,) = torch.autograd.grad(layer_norm_modulate(inputs.x, shift, scale, impl=impl), table, inputs.dy)
    want = exact(inputs._replace(shift=shift.detach(), scale=scale.detach()))
    for i, part in enumerate((want.dshift, want.dscale)):
        assert op_cases.error(grad[:, :, i], part.reshape(batch, length, dim)) <= 1e-5
    assert not grad[:, :, 2:].any()


def test_dshift_per_token_is_dy_itself(device, impl):
    """No copy: the gradient that arrives is the one that shift gets."""
    inputs = op_cases.make((2, 6, 64), device, form="per_token")
    assert differentiate(layer_norm_modulate, inputs, impl=impl).dshift.data_ptr() == inputs.dy.data_ptr()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 6, 8), (2, 0, 8), (0, 8)], ids=str)
def test_empty(device, impl, shape, form):
    inputs = op_cases.make(shape, device, form=form, frames=3)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert got.y.shape == got.dx.shape == shape
    assert got.dshift.shape == got.dscale.shape == inputs.scale.shape
    assert not got.dshift.any() and not got.dscale.any(), "a sum over no rows is zero"


@pytest.mark.parametrize("form", FORMS)
def test_formulas_agree(device, form):
    """`eager` and `wan` take the same forms. Float32 gradients by autograd round more often: twice the bar."""
    inputs = op_cases.make((2, 6, 64), device, form=form)
    for name in ("eager", "wan"):
        assert_close(differentiate(get_impl(name), inputs), exact(inputs), (2e-6, 1e-5))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    samples=st.sampled_from([(), (1,), (2,), (5,)]),
    frames=st.integers(1, 6),
    rows=st.integers(1, 8),
    dim=st.integers(8, 300),
    form=st.sampled_from(FORMS),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 4),
    layouts=st.tuples(*[st.sampled_from(sorted(set(LAYOUTS) - {"batch_inside"}))] * 4),
    seed=st.integers(0, 2**16),
)
def _any_inputs(device, impl, samples, frames, rows, dim, form, dtypes, layouts, seed):
    x_dtype, shift_dtype, scale_dtype, out_dtype = dtypes
    inputs = op_cases.make(
        (*samples, frames * rows, dim), device, x_dtype, (shift_dtype, scale_dtype), out_dtype, 0.0, seed, form, frames
    )
    # Layouts are of matrices; [D] of one sample has none.
    inputs = op_cases.Inputs(*(LAYOUTS[n](t) if t.dim() > 1 else t for n, t in zip(layouts, inputs, strict=True)))
    got = differentiate(layer_norm_modulate, inputs, impl=impl, out_dtype=out_dtype)
    # Twice the bars: they are for sizes at which errors average out.
    assert_close_by_dtype(got, exact(inputs), factor=2)


def test_any_inputs(device, impl):
    _any_inputs(device, impl)
