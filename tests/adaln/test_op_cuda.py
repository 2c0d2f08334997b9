"""What only the kernels on a GPU can get wrong: streams, graphs, alignment, extreme shapes, 64-bit offsets."""

from __future__ import annotations

import pytest
import torch

from repro.adaln import composite, get_impl, layer_norm_modulate
from tests.adaln import op_cases
from tests.adaln.op_cases import BARS, DTYPES, Results, assert_close, assert_same_bits, differentiate, exact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.fixture(params=["fused", "dtile"])
def impl(request):
    return request.param


def test_calls_reach_the_kernels_without_python(monkeypatch, impl):
    def refuse(*args, **options):
        raise AssertionError("the composite ran on a CUDA tensor")

    monkeypatch.setattr(composite, "run", refuse)
    differentiate(layer_norm_modulate, op_cases.make((2, 9, 64), "cuda"), impl=impl)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dim", [1, 2, 8, 63, 64, 65, 1001, 1536, 2050, 3072, 4096, 5120, 6144, 8192, 12345, 16384, 20000, 65536]
)
def test_dims(impl, dtype, dim):
    """Narrow rows, rows that no vector divides, rows wider than a block's registers and shared memory."""
    inputs = op_cases.make((2, 37, dim), "cuda", dtype)
    bars = BARS[dtype] if dim > 7 else (4e-3, 4e-3)  # tiny D cancels nearly all of dx
    got, want = differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs)
    if dim <= 2:  # dx is rounding alone
        assert op_cases.error(got.y, want.y) <= bars[0]
        assert float((got.dx.double() - want.dx).norm() / inputs.dy.double().norm()) <= 20 * bars[0]
    else:
        assert_close(got, want, bars)


@pytest.mark.parametrize(
    "shape", [(1, 70000, 16), (70000, 1, 16), (3, 30011, 24), (1, 64000, 1536), (129, 7, 512)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_rows_and_samples(impl, dtype, shape):
    """Past 65,535, the limit of a grid's second dimension; and more samples than blocks."""
    inputs = op_cases.make(shape, "cuda", dtype)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert_close(got, exact(inputs), BARS[dtype])
    assert_same_bits(differentiate(layer_norm_modulate, inputs, impl=impl), got)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 31, 33, 131, 133, 257, 1023])
def test_rows_that_no_block_divides(impl, rows):
    inputs = op_cases.make((3, rows, 1536), "cuda", torch.bfloat16)
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), BARS[torch.bfloat16])


@pytest.mark.parametrize("dim", [1536, 3072, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [4101, 50_003])
def test_a_row_does_not_depend_on_how_many_there_are(impl, dtype, dim, rows):
    """Many rows take another layout than a few; outputs and dx keep every bit, to the last row."""
    inputs = op_cases.make((1, rows, dim), "cuda", dtype)
    whole = differentiate(layer_norm_modulate, inputs, impl=impl)
    for some in (slice(0, 1000), slice(rows - 1000, rows)):
        few = op_cases.Inputs(*(t[:, some].contiguous() if t.shape[1] == rows else t for t in inputs))
        got = differentiate(layer_norm_modulate, few, impl=impl)
        assert torch.equal(got.y, whole.y[:, some]) and torch.equal(got.dx, whole.dx[:, some])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
def test_unaligned_pointers(impl, dtype, offset):
    """Every tensor starts off a 16-byte boundary: flat storage, `offset` elements in."""

    def shifted(tensor):
        flat = tensor.new_full((tensor.numel() + offset,), float("nan"))
        flat[offset:] = tensor.flatten()
        return flat[offset:].view(tensor.shape)

    inputs = op_cases.Inputs(*map(shifted, op_cases.make((2, 21, 1536), "cuda", dtype)))
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), BARS[dtype])


@pytest.mark.parametrize("extra", [1, 4, 8, 1536])
def test_row_strides(impl, extra):
    """Rows of x and dy inside wider ones, aligned or not; the rest is NaN and must not be read as data."""

    def widened(tensor):
        wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + extra), float("nan"))
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    inputs = op_cases.make((2, 37, 1536), "cuda", torch.bfloat16)
    inputs = inputs._replace(x=widened(inputs.x), dy=widened(inputs.dy))
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), BARS[torch.bfloat16])


@pytest.mark.parametrize("shape", [(2, 300, 1536), (1, 2000, 5120), (4, 3, 20000), (2, 37, 1001)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_output_element_is_written(impl, dtype, shape):
    inputs = op_cases.make(shape, "cuda", dtype)
    got = differentiate(layer_norm_modulate, inputs, impl=impl)
    assert all(t.isfinite().all() for t in got)
    assert_close(got, exact(inputs), BARS[dtype])


def test_graph_capture(impl):
    """Forward and backward in one CUDA graph, replayed on new data."""
    static = op_cases.make((2, 50, 1536), "cuda", torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        differentiate(layer_norm_modulate, static, impl=impl)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiate(layer_norm_modulate, static, impl=impl)
    for seed in (1, 2):
        fresh = op_cases.make((2, 50, 1536), "cuda", torch.bfloat16, seed=seed)
        for target, source in zip(static, fresh, strict=True):
            target.copy_(source)
        graph.replay()
        assert_same_bits(captured, differentiate(layer_norm_modulate, fresh, impl=impl))


def test_current_stream_is_used(impl):
    """Inputs appear on a side stream behind a long kernel; a launch elsewhere would read what was there before."""
    want = differentiate(layer_norm_modulate, inputs := op_cases.make((2, 50, 1536), "cuda"), impl=impl)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = op_cases.Inputs(*(torch.full_like(t, float("nan")) for t in inputs))
        torch.cuda._sleep(20_000_000)
        for target, source in zip(late, inputs, strict=True):
            target.copy_(source)
        got = differentiate(layer_norm_modulate, late, impl=impl)
    stream.synchronize()
    assert_same_bits(got, want)


def test_backward_runs_on_the_forwards_stream(impl):
    """Autograd replays the stream of the forward; gradients are right when backward is called from another one."""
    inputs = op_cases.make((2, 50, 1536), "cuda")
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = layer_norm_modulate(*leaves, impl=impl)
    torch.cuda.current_stream().wait_stream(stream)
    y.backward(inputs.dy)
    torch.cuda.synchronize()
    got = Results(y.detach(), *(leaf.grad for leaf in leaves))
    assert_same_bits(got, differentiate(layer_norm_modulate, inputs, impl=impl))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one(impl):
    inputs = op_cases.make((2, 50, 1536), "cuda:1")
    assert_close(differentiate(layer_norm_modulate, inputs, impl=impl), exact(inputs), BARS[torch.float32])


def test_both_backwards_agree():
    inputs = op_cases.make((2, 3000, 1536), "cuda")
    fused = differentiate(layer_norm_modulate, inputs, impl="fused")
    dtile = differentiate(layer_norm_modulate, inputs, impl="dtile")
    assert torch.equal(fused.y, dtile.y), "one forward for both"
    assert_close(dtile, Results(*(t.double() for t in fused)), BARS[torch.float32])


def test_saves_nothing_but_x_scale_and_statistics(impl):
    """As the allocator sees it: what stays between forward and backward is y and 8 bytes a row (rounded to 512)."""
    x, shift, scale, _ = op_cases.make((1, 4096, 1536), "cuda", torch.bfloat16)
    x.requires_grad_()
    before = torch.cuda.memory_allocated()
    y = layer_norm_modulate(x, shift, scale, impl=impl)
    assert torch.cuda.memory_allocated() - before <= y.nbytes + 8 * 4096 + 2 * 512


@pytest.mark.slow
def test_offsets_past_32_bits(impl):
    """2^31 elements and more in one tensor. Rows do not depend on each other, so the last ones are checked alone."""
    rows, dim = (1 << 31) // 5120 + 1000, 5120
    x = torch.empty(1, rows, dim, dtype=torch.bfloat16, device="cuda").normal_()
    shift, scale = torch.randn(2, 1, dim, device="cuda").unbind()
    dy = torch.ones((), dtype=torch.bfloat16, device="cuda").expand_as(x)
    whole = differentiate(layer_norm_modulate, op_cases.Inputs(x, shift, scale, dy), impl=impl)
    tail = exact(op_cases.Inputs(x[:, -64:], shift, scale, dy[:, -64:]))
    assert op_cases.error(whole.y[:, -64:], tail.y) <= BARS[torch.bfloat16][0]
    assert op_cases.error(whole.dx[:, -64:], tail.dx) <= BARS[torch.bfloat16][0]
    assert torch.equal(whole.dshift, torch.full_like(whole.dshift, rows)), "a sum of ones below 2^24 is exact"


@pytest.mark.parametrize("name", ["wan", "compile"])
def test_baselines_compute_the_same(name):
    inputs = op_cases.make((1, 64, 1536), "cuda", torch.bfloat16)
    assert_close(differentiate(get_impl(name), inputs), exact(inputs), (1e-2, 1e-2))
