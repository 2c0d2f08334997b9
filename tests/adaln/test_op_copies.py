"""No hidden copy: the kernels are handed the caller's own memory, strides included, and the backward keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from repro.adaln import composite, layer_norm_modulate, ops
from tests.adaln import op_cases

STATISTICS = 8  # bytes a row: mean and rstd in float32
ROUNDING = 512  # the CUDA allocator's, for each tensor


def memory(tensors: Sequence[Tensor]) -> list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]]:
    """What tells a tensor from a copy of it."""
    return [(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype) for t in tensors]


class Dispatched(TorchDispatchMode):
    """Every operator that runs below autograd, with its tensor arguments; what an operator calls itself does not count.

    Views are left out: they copy nothing, and autograd takes some.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.calls.append((func, memory([a for a in args if isinstance(a, Tensor)])))
        return func(*args, **(kwargs or {}))


def _strided(shape, device, dtype=torch.float32, table_dtype=None):
    """x and dy as rows of wider ones, shift and scale as chunks of a [B, 6, D] table: nothing is contiguous."""
    batch, rows, dim = shape
    generator = torch.Generator().manual_seed(0)

    def draw(*size, dtype):
        return torch.randn(size, generator=generator).to(device, dtype)

    x, dy = (draw(batch, rows, dim + 16, dtype=dtype)[..., 8 : 8 + dim] for _ in range(2))
    shift, scale, *_ = draw(batch, 6, dim, dtype=table_dtype or dtype).chunk(6, dim=1)
    inputs = op_cases.Inputs(*(t.detach().requires_grad_() for t in (x, shift, scale)), dy)
    assert not any(t.is_contiguous() for t in inputs)
    return inputs


@pytest.fixture(params=[(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=["float32", "bf16-f32"])
def inputs(request, device):
    return _strided((2, 50, 64), device, *request.param)


@pytest.fixture
def forward_and_backward(inputs, impl):
    """Call it for y and the gradients of x, shift and scale, which stay alive: no address is used twice."""

    def call():
        y = layer_norm_modulate(*inputs[:3], impl=impl)
        return y, *torch.autograd.grad(y, inputs[:3], inputs.dy)

    return call


def test_the_callers_own_memory_is_saved(inputs, impl):
    """x and scale themselves, as strided as they are; besides, 8 bytes a row."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer_norm_modulate(*inputs[:3], impl=impl)
    x, _, scale, _ = inputs
    assert memory(saved[:2]) == memory([x, scale])
    assert sum(t.nbytes for t in saved[2:]) == STATISTICS * 2 * 50 and len(saved) == 3


def test_one_operator_each_way_takes_the_callers_own_memory(inputs, forward_and_backward):
    """Nothing else runs, so that neither direction copies an argument or a result."""
    with Dispatched() as seen:
        results = forward_and_backward()
    (forward, forward_memory), (backward, backward_memory) = seen.calls
    assert (forward, backward) == (ops.forward_op, ops.backward_op)
    x, shift, scale, dy = inputs
    assert forward_memory == memory([x, shift, scale])
    assert backward_memory[:3] == memory([dy, x, scale]) and len(backward_memory) == 4
    assert [t.dtype for t in results] == [x.dtype, x.dtype, shift.dtype, scale.dtype]


def test_the_composite_takes_the_callers_own_memory(monkeypatch):
    """The step between operator and formula; on a GPU with the kernels C++ takes its place (below)."""
    inputs = _strided((2, 50, 64), "cpu")
    taken = []
    for name in ("forward", "backward"):
        formula = getattr(composite, name)

        def record(*args, formula=formula):
            taken.append(memory([a for a in args if isinstance(a, Tensor)]))
            return formula(*args)

        monkeypatch.setattr(composite, name, record)
    y = layer_norm_modulate(*inputs[:3])
    torch.autograd.grad(y, inputs[:3], inputs.dy)
    x, shift, scale, dy = inputs
    assert taken[0] == memory([x, shift, scale]) and taken[1][:3] == memory([dy, x, scale])


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["fused", "dtile"])
def test_peak_memory(cuda, impl):
    """As the allocator sees it at its highest: results and statistics; the backward adds a workspace of partial sums.

    The workspace has a few rows of float32 sums for each multiprocessor, whatever N; a copy of x would be 48 MiB.
    """
    torch.cuda.empty_cache()  # blocks that other tests left would be handed out whole, larger than asked for
    inputs = _strided((2, 8192, 1536), cuda, torch.bfloat16)
    torch.autograd.grad(layer_norm_modulate(*inputs[:3], impl=impl), inputs[:3], inputs.dy)  # lazy set-up is over

    def peak(call):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    y, forward = peak(lambda: layer_norm_modulate(*inputs[:3], impl=impl))
    assert forward <= y.nbytes + STATISTICS * 16384 + 3 * ROUNDING
    gradients, backward = peak(lambda: torch.autograd.grad(y, inputs[:3], inputs.dy))
    assert backward <= sum(t.nbytes for t in gradients) + y.nbytes / 2
