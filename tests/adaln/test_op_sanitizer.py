"""Every kernel at small sizes: what `python -m repro.adaln.sanitize` runs under compute-sanitizer.

Inputs are copied from the host and results back to it, and nothing is poisoned: memory that a kernel should have
written and did not stays unwritten, for initcheck to see.
"""

from __future__ import annotations

import functools

import pytest
import torch

from repro.adaln import build, gated_residual_layer_norm_modulate, layer_norm_modulate
from tests.adaln import op_cases
from tests.adaln.op_cases import (
    FORMS,
    GatedInputs,
    assert_close_by_dtype,
    differentiate,
    differentiate_gated,
    exact,
    exact_gated,
)

pytestmark = pytest.mark.gpu

F32, BF16 = torch.float32, torch.bfloat16

SHAPES = [(2, 9, 7), (2, 600, 64), (3, 6, 1001), (1, 600, 1536), (1, 300, 5120), (2, 3, 20000)]
"""Scalar, narrow, unaligned, one to several rows a block, and wider than a block's registers."""


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    assert build.ensure_loaded(), build.failure()


def _check(inputs, run):
    """`inputs` on the host; `run` gets them on the GPU."""
    got = run(type(inputs)(*(None if t is None else t.cuda() for t in inputs)))
    got = type(got)(*(None if t is None else t.cpu() for t in got))
    want = exact_gated(inputs, got.h) if isinstance(inputs, GatedInputs) else exact(inputs)
    # Few features cancel most of dx.
    assert_close_by_dtype(got, want, factor=1 if inputs.x.shape[-1] > 8 else 20)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm(dtype, shape, form):
    inputs = op_cases.make(shape, dtype=dtype, form=form, frames=3)
    _check(inputs, functools.partial(differentiate, layer_norm_modulate))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dtile(shape):
    _check(op_cases.make(shape, dtype=BF16), functools.partial(differentiate, layer_norm_modulate, impl="dtile"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
@pytest.mark.parametrize("shape", SHAPES[1:5], ids=str)
def test_gated_residual(shape, gated, form):
    inputs = op_cases.make_gated(shape, dtype=BF16, modulation=(F32,) * 3, form=form, frames=3, gated=gated)
    _check(inputs, functools.partial(differentiate_gated, gated_residual_layer_norm_modulate))


@pytest.mark.parametrize("form", FORMS)
def test_float32_residual_stream(form):
    inputs = op_cases.make_gated((2, 60, 1536), dtype=F32, branch=BF16, out_dtype=BF16, form=form, frames=3)
    _check(inputs, functools.partial(differentiate_gated, gated_residual_layer_norm_modulate, out_dtype=BF16))
