"""Rows and samples do not mix: what one holds never reaches another, and a bad value stays where it is."""

from __future__ import annotations

import math

import pytest
import torch

from repro.adaln import gated_residual_layer_norm_modulate, layer_norm_modulate
from tests.adaln import op_cases
from tests.adaln.op_cases import FORMS, GatedResults, differentiate, differentiate_gated

SHAPE = (3, 12, 264)
ROW = (1, 7)
"""The row that a bad value is put into: of a sample in the middle."""


def _run(inputs, impl):
    if isinstance(inputs, op_cases.GatedInputs):
        return differentiate_gated(gated_residual_layer_norm_modulate, inputs)
    return differentiate(layer_norm_modulate, inputs, impl=impl)


@pytest.fixture(params=["norm", "gated", "plain"])
def make(request, impl):
    if request.param == "norm":
        return op_cases.make
    if impl == "dtile":
        pytest.skip("the gated operator has one backward")
    return lambda *args, **options: op_cases.make_gated(*args, gated=request.param == "gated", **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("others", ["random", "huge", "nan"])
def test_a_sample_does_not_depend_on_the_others(device, impl, make, dtype, form, others):
    """Outputs and gradients of sample 1 keep every bit when all other samples' values change."""
    inputs = make(SHAPE, device, dtype, form=form)
    changed = make(SHAPE, device, dtype, form=form, seed=1)
    for before, after in zip(inputs, changed, strict=True):
        if before is None:
            continue
        if others != "random":
            after.fill_(1e4 if others == "huge" else math.nan)
        after[1] = before[1]
    kept, got = _run(inputs, impl), _run(changed, impl)
    for name, a, b in zip(kept._fields, kept, got, strict=True):
        assert a is None or torch.equal(a[1], b[1]), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_value_spoils_its_own_row_only(device, impl, make, dtype, form, bad):
    """y and dx are NaN in the whole row; of the sums over rows only those are NaN that the row is part of."""
    inputs = make(SHAPE, device, dtype, form=form)
    clean = _run(inputs, impl)
    x = inputs.x.clone()
    x[*ROW, 3] = bad
    got = _run(inputs._replace(x=x), impl)

    spoilt = torch.zeros(SHAPE[:2], dtype=torch.bool, device=device)
    spoilt[ROW] = True
    of_rows = ["y", "dx", *(["dbranch"] if isinstance(got, GatedResults) else [])]
    for name in of_rows:
        a, b = getattr(got, name), getattr(clean, name)
        assert a[spoilt].isnan().all(), f"{name}: the row is NaN throughout"
        assert torch.equal(a[~spoilt], b[~spoilt]), f"{name}: another row changed"
    # One entry of the modulation for each group of rows that shares it.
    shared = {"per_sample": 1, "per_frame": inputs.scale.shape[1], "per_token": SHAPE[1]}[form]
    groups = spoilt.unflatten(1, (shared, -1)).any(-1)
    for name in ("dscale", "dgate"):
        a, b = getattr(got, name, None), getattr(clean, name, None)
        if a is not None:
            a, b = (t.reshape(*groups.shape, SHAPE[2]) for t in (a, b))
            assert a[groups].isnan().all(), f"{name}: a sum over the row is NaN"
            assert torch.equal(a[~groups], b[~groups]), f"{name}: another sum changed"
    assert torch.equal(got.dshift, clean.dshift), "dshift does not read x"


def test_a_constant_row_is_shift(device, impl):
    """No spread at all: y is shift, and gradients stay finite thanks to eps."""
    inputs = op_cases.make((2, 9, 264), device)
    inputs.x[1, 4] = 3.0
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert torch.equal(got.y[1, 4], inputs.shift[1]) and all(t.isfinite().all() for t in got)
