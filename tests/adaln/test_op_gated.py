"""The gated residual ahead of the norm: values and gradients, fused or, where the kernels cannot, put together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.adaln import gated_residual_layer_norm_modulate, layer_norm_modulate, reference
from tests.adaln import op_cases
from tests.adaln.op_cases import (
    BARS,
    DTYPES,
    FORMS,
    LAYOUTS,
    GatedInputs,
    assert_close,
    assert_close_by_dtype,
    assert_same_bits,
    differentiate,
    differentiate_gated,
    exact_gated,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, poisoned_memory):
    """There is one backward of this operator: no `impl` to choose."""
    return request.getfixturevalue("cuda") if request.param == "cuda" else "cpu"


def _got_and_want(inputs: GatedInputs, **options):
    got = differentiate_gated(gated_residual_layer_norm_modulate, inputs, **options)
    return got, exact_gated(inputs, got.h)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 20, 1536), (3, 6, 1000), (40, 264), (2, 6, 33), (2, 1, 64)], ids=str)
def test_against_float64(device, shape, dtype, form, gated):
    """D = 33 cannot be fused: residual and norm one by one, with one more rounding of dx."""
    got, want = _got_and_want(op_cases.make_gated(shape, device, dtype, form=form, gated=gated))
    assert_close(got, want, BARS[dtype])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "branch", "modulation", "out_dtype"),
    [
        (F32, BF16, (F32, F32, F32), BF16),  # a float32 residual stream: fused
        (BF16, BF16, (F32, F32, F32), BF16),  # Diffusers: fused
        (BF16, BF16, (BF16, F32, F16), BF16),
        (F32, BF16, (F32, F32, F32), F32),  # the rest is not
        (BF16, F32, (F32, F32, F32), F32),
        (F16, F16, (F32, F32, F32), BF16),
        (BF16, F16, (F16, BF16, F32), BF16),
    ],
    ids=str,
)
def test_mixed_dtypes(device, form, dtype, branch, modulation, out_dtype):
    inputs = op_cases.make_gated((2, 6, 264), device, dtype, branch, modulation, out_dtype, form=form)
    got, want = _got_and_want(inputs, out_dtype=out_dtype)
    assert [t.dtype for t in got] == [dtype, out_dtype, dtype, branch, *modulation]
    # dbranch and dgate may be of a dx that was rounded to x's dtype first: never better than that.
    for name, g, w in zip(got._fields, got, want, strict=True):
        bar = max(BARS[g.dtype][0], BARS[dtype][0] if name in ("dbranch", "dgate", "dx") else 0.0)
        assert op_cases.error(g, w) <= max(bar, BARS[g.dtype][1] if name in op_cases.SUMS else 0.0), name


def test_h_is_rounded_once(device):
    """x + gate * branch in float32, then one rounding: within a rounding of the exact sum, everywhere."""
    inputs = op_cases.make_gated((2, 24, 264), device, BF16, modulation=(F32, F32, F32))
    h, _ = gated_residual_layer_norm_modulate(*inputs[:5])
    exact = inputs.x.double() + inputs.gate.double()[:, None] * inputs.branch.double()
    # bfloat16's unit roundoff, and float32's own roundings of terms that may cancel.
    slack = 2**-8 * exact.abs() + 2**-22 * (inputs.x.double().abs() + (exact - inputs.x.double()).abs())
    assert ((h.double() - exact).abs() <= slack).all()


def test_norm_is_of_the_rounded_h(device):
    """The same as the norm alone of what was returned: whatever reads h later reads what was normalized."""
    inputs = op_cases.make_gated((2, 24, 264), device, BF16)
    h, y = gated_residual_layer_norm_modulate(*inputs[:5])
    alone = layer_norm_modulate(h, inputs.shift, inputs.scale)
    # Not bit for bit: the kernels may sum a row in another order. One rounding of y apart at most.
    assert op_cases.error(y, alone.double()) <= BARS[BF16][0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
def test_only_y_is_used(device, form, gated):
    """dh is absent: nothing is added to the norm's own gradient."""
    inputs = op_cases.make_gated((2, 6, 64), device, form=form, gated=gated)._replace(dh=None)
    got, want = _got_and_want(inputs)
    assert_close(got, want, BARS[F32])
    if not gated:
        alone = differentiate(layer_norm_modulate, op_cases.Inputs(got.h, inputs.shift, inputs.scale, inputs.dy))
        assert torch.equal(got.dx, alone.dx)
        if device == "cpu":
            assert torch.equal(got.dscale, alone.dscale)
        else:  # the kernels of both forms group the rows of a sum each in its own way
            assert op_cases.error(got.dscale, alone.dscale) <= BARS[F32][1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
def test_only_h_is_used(device, form, gated):
    inputs = op_cases.make_gated((2, 6, 64), device, form=form, gated=gated)._replace(dy=None)
    got, want = _got_and_want(inputs)
    assert_close(got, want, BARS[F32])
    assert torch.equal(got.dx, inputs.dh)
    assert not got.dshift.any() and not got.dscale.any()


def test_neither_is_used(device):
    inputs = op_cases.make_gated((2, 6, 64), device)
    leaves = [t.detach().requires_grad_() for t in inputs[:5]]
    h, _ = gated_residual_layer_norm_modulate(*leaves)
    (h * 0).sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


def test_a_plain_residual_has_one_gradient_for_both(device):
    """Bit for bit, and without a copy of it."""
    inputs = op_cases.make_gated((2, 6, 64), device, gated=False)
    got = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    assert got.dgate is None and got.dbranch.data_ptr() == got.dx.data_ptr()


@pytest.mark.parametrize("wanted", range(5))
def test_only_some_inputs_need_gradients(device, wanted):
    inputs = op_cases.make_gated((2, 6, 64), device)
    leaves = [t.detach().requires_grad_(i == wanted) for i, t in enumerate(inputs[:5])]
    h, y = gated_residual_layer_norm_modulate(*leaves)
    torch.autograd.backward((h, y), (inputs.dh, inputs.dy))
    full = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    for i, leaf in enumerate(leaves):
        assert torch.equal(leaf.grad, full[2 + i]) if i == wanted else leaf.grad is None


def test_the_stride_of_a_single_sample_may_be_anything(device):
    inputs = op_cases.make_gated((1, 9, 64), device)
    shift, scale, gate = torch.randn(3, 1, 65, generator=torch.Generator().manual_seed(1)).to(device)[..., :64]
    assert shift.stride(0) == 65
    assert_close(*_got_and_want(inputs._replace(shift=shift, scale=scale, gate=gate)), BARS[torch.float32])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "branch", "gate", "dh", "dy"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [64, 65])
def test_strides(device, form, which, layout, dim):
    """Unaligned and transposed tensors, and of an odd width all, cannot be fused as they are; answers stay the same."""
    inputs = op_cases.make_gated((2, 6, dim), device, form=form)
    tensor = getattr(inputs, which)
    if form == "per_sample" and which == "gate" and layout == "batch_inside":
        pytest.skip("[B, D] has no second sample axis")
    inputs = inputs._replace(**{which: LAYOUTS[layout](tensor)})
    got, want = _got_and_want(inputs)
    assert got.h.is_contiguous() and got.y.is_contiguous()
    assert_close(got, want, BARS[F32])


def test_expanded_gradients(device):
    """What sums send back: stride 0 everywhere."""
    inputs = op_cases.make_gated((2, 6, 64), device)
    ones = torch.ones((), device=device).expand(2, 6, 64)
    got, want = _got_and_want(inputs._replace(dh=ones, dy=ones))
    assert_close(got, want, BARS[F32])


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 6, 8), (2, 0, 8), (0, 8)], ids=str)
def test_empty(device, shape, form, gated):
    inputs = op_cases.make_gated(shape, device, form=form, frames=3, gated=gated)
    got = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    assert got.h.shape == got.y.shape == got.dx.shape == got.dbranch.shape == shape
    for t in (got.dshift, got.dscale, got.dgate):
        assert t is None or (t.shape == inputs.scale.shape and not t.any())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
def test_formulas_agree(device, form, gated):
    """`gated_eager` and `gated_wan` compute the same in float32. They round more often: four times the bar."""
    inputs = op_cases.make_gated((2, 6, 64), device, form=form, gated=gated)
    for formula in (reference.gated_eager, reference.gated_wan):
        got = differentiate_gated(formula, inputs)
        assert_close(got, exact_gated(inputs, got.h), (4e-6, 4e-5))


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
def test_wan_gated_residual_is_in_float32(device, gated):
    inputs = op_cases.make_gated((2, 6, 64), device, BF16, modulation=(F32, F32, F32), gated=gated)
    h, y = reference.gated_wan(*inputs[:5])
    added = inputs.branch.float() * (inputs.gate[:, None] if gated else 1)
    assert torch.equal(h, (inputs.x.float() + added).bfloat16()) and y.dtype == BF16


@pytest.mark.parametrize("form", FORMS)
def test_bitwise_repeatable(device, form):
    inputs = op_cases.make_gated((2, 20, 264), device, BF16, form=form)
    first = differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    for _ in range(3):
        assert_same_bits(differentiate_gated(gated_residual_layer_norm_modulate, inputs), first)


def test_inputs_are_left_alone(device):
    inputs = op_cases.make_gated((2, 6, 64), device)
    before = [t.clone() for t in inputs]
    differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    samples=st.sampled_from([(), (1,), (2,), (5,)]),
    frames=st.integers(1, 6),
    rows=st.integers(1, 8),
    dim=st.one_of(st.integers(8, 300), st.integers(1, 40).map(lambda n: 8 * n)),
    form=st.sampled_from(FORMS),
    gated=st.booleans(),
    absent=st.sampled_from(["", "dh", "dy"]),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(sorted(set(LAYOUTS) - {"batch_inside"}))] * 7),
    seed=st.integers(0, 2**16),
)
def _any_inputs(device, samples, frames, rows, dim, form, gated, absent, dtype, layouts, seed):
    inputs = op_cases.make_gated(
        (*samples, frames * rows, dim), device, dtype, seed=seed, form=form, frames=frames, gated=gated
    )
    arranged = (LAYOUTS[n](t) if t is not None and t.dim() > 1 else t for n, t in zip(layouts, inputs, strict=True))
    inputs = GatedInputs(*arranged)
    if absent:
        inputs = inputs._replace(**{absent: None})
    got, want = _got_and_want(inputs)
    # Twice the bars: they are for sizes at which errors average out.
    assert_close_by_dtype(got, want, factor=2)


def test_any_inputs(device):
    _any_inputs(device)
