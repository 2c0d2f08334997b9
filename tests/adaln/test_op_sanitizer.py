"""Every kernel at small sizes: what `python -m repro.adaln.sanitize` runs under compute-sanitizer.

Inputs are copied from the host and results back to it, and nothing is poisoned: memory that a kernel should have
written and did not stays unwritten, for initcheck to see.

Widths stand for lines of the launch tables: one warp, the three of Wan's models, and wider ones up to where a block's
registers no longer hold a row. Few rows are enough for what a block does at its start and end; `LONG` has as many as
make every block of an H200 come round its ring of rows in shared memory, in one sample and in several, a row and two at
a time (test_launch_plans.py works it out).
"""

from __future__ import annotations

import functools

import pytest
import torch

from repro.adaln import build, gated_residual_layer_norm_modulate, layer_norm_modulate
from tests.adaln import op_cases
from tests.adaln.op_cases import (
    GatedInputs,
    assert_close_by_dtype,
    differentiate,
    differentiate_gated,
    exact,
    exact_gated,
    rows_apart,
)

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

SAME = {"bf16": (BF16, BF16), "fp32": (F32, F32)}
NARROWING = {"fp32-bf16": (F32, BF16), "fp32-fp16": (F32, F16)}
OTHERS = {"fp16": (F16, F16), "bf16-fp32": (BF16, F32), "fp16-fp32": (F16, F32)}
TYPES = SAME | NARROWING | OTHERS
"""Of x and y."""

DIMS = (64, 1536, 3072, 5120, 8192, 12288, 20000)
LONG = [(1, 1601, 1536), (8, 201, 1536), (2, 1601, 2048), (1, 801, 5120), (2, 501, 6144)]
MANY = (300, 3, 1536)

NORMS = [
    *((t, form, dim) for t in SAME for form in ("per_sample", "per_token") for dim in DIMS),
    *((t, form, dim) for t in NARROWING | OTHERS for form in ("per_sample", "per_token") for dim in (1536, 5120)),
    *((t, "per_frame", 1536) for t in SAME),
]
RESIDUALS = [
    *((t, form, dim) for t in ("bf16", "fp32-bf16") for form in ("per_sample", "per_token") for dim in DIMS[1:]),
    *((t, form, 1536) for t in ("fp32", "fp16", "fp32-fp16") for form in ("per_sample", "per_token")),
    ("bf16", "per_frame", 1536),
]


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    assert build.ensure_loaded(), build.failure()


def _rows(form):
    """Odd in every sample and frame, so that no group of two rows divides them."""
    return 21 if form == "per_frame" else 37


def _to_gpu(tensor):
    """Strides and the offset in memory are kept, where `Tensor.cuda` would pack a view."""
    if tensor is None:
        return None
    whole = tensor if tensor._base is None else tensor._base
    return whole.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _check(inputs, run, **options):
    """`inputs` on the host; `run` gets them on the GPU."""
    got = run(type(inputs)(*map(_to_gpu, inputs)), **options)
    got = type(got)(*(None if t is None else t.cpu() for t in got))
    want = exact_gated(inputs, got.h) if isinstance(inputs, GatedInputs) else exact(inputs)
    # Few features cancel most of dx.
    assert_close_by_dtype(got, want, factor=1 if inputs.x.shape[-1] > 8 else 20)


_norm = functools.partial(differentiate, layer_norm_modulate)
_residual = functools.partial(differentiate_gated, gated_residual_layer_norm_modulate)


@pytest.mark.parametrize(("types", "form", "dim"), NORMS)
def test_norm(types, form, dim):
    dtype, out_dtype = TYPES[types]
    inputs = op_cases.make((2, _rows(form), dim), dtype=dtype, out_dtype=out_dtype, form=form, frames=3)
    _check(inputs, _norm, out_dtype=out_dtype)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
@pytest.mark.parametrize(("types", "form", "dim"), RESIDUALS)
def test_residual(types, form, dim, gated):
    dtype, out_dtype = TYPES[types]
    inputs = op_cases.make_gated(
        (2, _rows(form), dim), "cpu", dtype, out_dtype, (F32,) * 3, out_dtype, form=form, frames=3, gated=gated
    )
    _check(inputs, _residual, out_dtype=out_dtype)


@pytest.mark.parametrize("left_out", ["dh", "dy"])
def test_residual_with_one_gradient(left_out):
    inputs = op_cases.make_gated((2, 37, 1536), dtype=BF16)
    if left_out == "dh":
        _check(inputs._replace(dh=None), _residual)
    else:  # nothing is left of the norm's own gradients
        got = _residual(type(inputs)(*map(_to_gpu, inputs._replace(dy=None))))
        assert op_cases.error(got.dx.cpu(), inputs.dh) <= op_cases.BARS[BF16][0]


@pytest.mark.parametrize("kind", ["norm", "per_token", "gated"])
@pytest.mark.parametrize("shape", [*LONG, MANY], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_many_rows(kind, shape, dtype):
    if kind == "gated":
        _check(op_cases.make_gated(shape, dtype=dtype), _residual)
    else:
        form = kind if kind == "per_token" else "per_sample"
        _check(op_cases.make(shape, dtype=dtype, form=form), _norm)


@pytest.mark.parametrize("shape", [(2, 9, 7), (2, 37, 1536), (8, 113, 1536), (1, 300, 5120)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_dtile(shape, dtype):
    _check(op_cases.make(shape, dtype=dtype), functools.partial(_norm, impl="dtile"))


@pytest.mark.parametrize("form", ["per_sample", "per_token"])
@pytest.mark.parametrize("shape", [(2, 9, 7), (3, 6, 1001), (2, 3, 40000)], ids=str)
@pytest.mark.parametrize("types", TYPES)
def test_rows_that_vectors_cannot_walk(types, shape, form):
    dtype, out_dtype = TYPES[types]
    _check(op_cases.make(shape, dtype=dtype, out_dtype=out_dtype, form=form), _norm, out_dtype=out_dtype)


@pytest.mark.parametrize("gated", [True, False], ids=["gate", "plain"])
def test_residual_one_by_one(gated):
    _check(op_cases.make_gated((3, 6, 1001), dtype=BF16, modulation=(F32,) * 3, gated=gated), _residual)


@pytest.mark.parametrize("apart", [5, 8], ids=["unaligned", "aligned"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_views(dtype, apart):
    """Rows inside wider ones, off the start of their memory; shift and scale chunks of a table."""

    def inside(tensor):
        if apart == 5:
            return rows_apart(tensor)
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 2 * apart), float("nan"))
        wide[..., apart:-apart] = tensor
        return wide[..., apart:-apart]

    inputs = op_cases.make((2, 37, 1536), dtype=dtype)
    table = torch.stack([inputs.shift, inputs.scale, inputs.shift], dim=1)
    shift, scale, _ = table.unbind(1)
    _check(inputs._replace(x=inside(inputs.x), dy=inside(inputs.dy), shift=shift, scale=scale), _norm)
