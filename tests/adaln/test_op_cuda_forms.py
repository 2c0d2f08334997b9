"""What only the kernels on a GPU can get wrong, for the other forms and the gated residual."""

from __future__ import annotations

import functools

import pytest
import torch

from repro.adaln import gated_residual_layer_norm_modulate, layer_norm_modulate
from tests.adaln import op_cases
from tests.adaln.op_cases import (
    BARS,
    FORMS,
    GatedInputs,
    assert_close,
    assert_same_bits,
    differentiate,
    differentiate_gated,
    exact,
    exact_gated,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

F32, BF16 = torch.float32, torch.bfloat16

KINDS = {
    "norm": (op_cases.make, functools.partial(differentiate, layer_norm_modulate)),
    "gated": (op_cases.make_gated, functools.partial(differentiate_gated, gated_residual_layer_norm_modulate)),
    "plain": (
        functools.partial(op_cases.make_gated, gated=False),
        functools.partial(differentiate_gated, gated_residual_layer_norm_modulate),
    ),
}


@pytest.fixture(params=FORMS)
def form(request):
    return request.param


@pytest.fixture(params=KINDS)
def kind(request):
    """How inputs are made, and how results are got from them."""
    return KINDS[request.param]


def _check(inputs, got, bars):
    want = exact_gated(inputs, got.h) if isinstance(inputs, GatedInputs) else exact(inputs)
    assert_close(got, want, bars)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [8, 63, 64, 1001, 1536, 2048, 3072, 5120, 8192, 16384, 20000])
def test_dims(kind, form, dtype, dim):
    """Narrow rows, rows that no vector divides, rows wider than a block's registers and shared memory."""
    make, run = kind
    inputs = make((2, 38, dim), "cuda", dtype, form=form)
    _check(inputs, run(inputs), BARS[dtype] if dim > 8 else tuple(20 * b for b in BARS[dtype]))


@pytest.mark.parametrize("shape", [(1, 70000, 16), (70000, 1, 16), (1, 12000, 1536), (129, 6, 512)], ids=str)
def test_many_rows_and_samples(kind, form, shape):
    """Past 65,535, the limit of a grid's second dimension; and more samples than blocks."""
    make, run = kind
    inputs = make(shape, "cuda", BF16, form=form)
    got = run(inputs)
    _check(inputs, got, BARS[BF16])
    assert_same_bits(run(inputs), got)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("dim", [512, 1536, 5120])
def test_a_row_does_not_depend_on_how_many_there_are(kind, form, dtype, dim):
    """Many rows take another layout than a few; results of a row keep every bit, to the last row."""
    if form == "per_frame":
        pytest.skip("fewer rows would be fewer frames")
    make, run = kind
    inputs, rows = make((1, 20_003, dim), "cuda", dtype, form=form), 20_003
    whole = run(inputs)
    for some in (slice(0, 1000), slice(rows - 1000, rows)):
        of_rows = [t is not None and t.ndim == 3 and t.shape[1] == rows for t in inputs]
        few = type(inputs)(*(t[:, some].contiguous() if of else t for t, of in zip(inputs, of_rows, strict=True)))
        for name, a, b in zip(whole._fields, whole, run(few), strict=True):
            if a is not None and a.ndim == 3 and a.shape[1] == rows:
                assert torch.equal(a[:, some], b), name


@pytest.mark.parametrize("frames", [1, 3, 7, 21])
@pytest.mark.parametrize("rows", [1, 2, 131, 1560])
def test_frames(kind, frames, rows):
    make, run = kind
    inputs = make((2, frames * rows, 1536), "cuda", BF16, form="per_frame", frames=frames)
    _check(inputs, run(inputs), BARS[BF16])


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F32, BF16, BF16), (BF16, BF16, BF16)], ids=str)
def test_residual_streams(form, dtypes):
    """Those that are fused, fp32 in and bf16 out among them, with modulation in fp32 as Wan has it."""
    dtype, branch, out_dtype = dtypes
    inputs = op_cases.make_gated((2, 96, 1536), "cuda", dtype, branch, (F32,) * 3, out_dtype, form=form)
    got = differentiate_gated(gated_residual_layer_norm_modulate, inputs, out_dtype=out_dtype)
    assert [t.dtype for t in got] == [dtype, out_dtype, dtype, branch, F32, F32, F32]
    op_cases.assert_close_by_dtype(got, exact_gated(inputs, got.h))


def test_bitwise_repeatable_over_100_runs(kind, form):
    make, run = kind
    inputs = make((3, 1000, 1536), "cuda", BF16, form=form)
    first = run(inputs)
    for _ in range(100):
        assert_same_bits(run(inputs), first)


@pytest.mark.parametrize("dim", [1536, 1001])
def test_graph_capture(kind, form, dim):
    """Forward and backward in one CUDA graph, replayed on new data. D = 1001 takes the residual one by one."""
    make, run = kind
    static = make((2, 50, dim), "cuda", BF16, form=form)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(static)
    for seed in (1, 2):
        fresh = make((2, 50, dim), "cuda", BF16, form=form, seed=seed)
        for target, source in zip(static, fresh, strict=True):
            if source is not None:
                target.copy_(source)
        graph.replay()
        assert_same_bits(captured, run(fresh))


def test_current_stream_is_used(kind):
    """Inputs appear on a side stream behind a long kernel; a launch elsewhere would read what was there before."""
    make, run = kind
    want = run(inputs := make((2, 50, 1536), "cuda"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = type(inputs)(*(None if t is None else torch.full_like(t, float("nan")) for t in inputs))
        torch.cuda._sleep(20_000_000)
        for target, source in zip(late, inputs, strict=True):
            if source is not None:
                target.copy_(source)
        got = run(late)
    stream.synchronize()
    assert_same_bits(got, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one(kind, form):
    make, run = kind
    inputs = make((2, 50, 1536), "cuda:1", form=form)
    got = run(inputs)
    assert all(t is None or t.device == torch.device("cuda:1") for t in got)
    _check(inputs, got, BARS[F32])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["per_sample", "per_token"])
def test_offsets_past_32_bits(kind, form):
    """2^31 elements and more in one tensor. Rows do not depend on each other, so the last ones are checked alone."""
    rows, dim, tail = (1 << 31) // 5120 + 1000, 5120, 64
    make, run = kind
    # One small set of inputs, the tail's, repeated: draws of the whole would take minutes.
    last = make((1, tail, dim), "cuda", BF16, form=form)
    repeats = -(-rows // tail)
    whole = type(last)(*(t.repeat(1, repeats, 1) if t is not None and t.shape[-2] == tail else t for t in last))
    got = run(whole)
    want = exact_gated(last, got.h[:, -tail:]) if isinstance(last, GatedInputs) else exact(last)
    for name, g, w in zip(got._fields, got, want, strict=True):
        if w is None:
            continue
        if g.shape[-2:] == (repeats * tail, dim):
            g = g[:, -tail:]
        elif name in op_cases.SUMS:
            w = w * repeats
        assert op_cases.error(g, w) <= BARS[BF16][0], name


def test_modulation_is_not_copied(kind):
    """As the allocator sees it: per token nothing but results, statistics and a workspace is allocated."""
    make, _ = kind
    inputs = make((1, 4096, 1536), "cuda", BF16, form="per_token")
    gated = isinstance(inputs, GatedInputs)
    function = gated_residual_layer_norm_modulate if gated else layer_norm_modulate
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs[: 5 if gated else 3]]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # blocks that other tests left would be handed out whole, larger than asked for
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = function(*leaves)
    results = (2 if gated else 1) * inputs.x.nbytes
    assert torch.cuda.max_memory_allocated() - before <= results + 8 * 4096 + 4 * 512
    torch.autograd.grad(out, [t for t in leaves if t is not None], [inputs.dy] * (2 if gated else 1))
    # dx and dscale, with a gate dbranch and dgate besides; dshift is dy. Half a tensor more for the workspace.
    gradients = 4 if gated and inputs.gate is not None else 2
    assert torch.cuda.max_memory_allocated() - before - results <= (gradients + 0.5) * inputs.x.nbytes


def test_plain_residual_does_not_keep_the_branch():
    inputs = op_cases.make_gated((1, 4096, 1536), "cuda", BF16, gated=False)
    x, branch, _, shift, scale = (None if t is None else t.detach().requires_grad_() for t in inputs[:5])
    before = torch.cuda.memory_allocated()
    out = gated_residual_layer_norm_modulate(x, branch * 1, None, shift, scale)
    assert torch.cuda.memory_allocated() - before <= 2 * x.nbytes + 8 * 4096 + 3 * 512
    del out
