"""Inputs for the op, its float64 answer, and the distance between the two.

The bars (relative error in the 2-norm against float64, unit-scale inputs): float32 1e-6 for y and dx, 1e-5 for the
sums over rows dshift and dscale; bfloat16 4e-3, about twice its unit roundoff 2^-9; float16 an eighth of that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from repro.adaln import reference

BARS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (4e-3, 4e-3), torch.float16: (5e-4, 5e-4)}
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)


class Inputs(NamedTuple):
    x: Tensor
    shift: Tensor
    scale: Tensor
    dy: Tensor


class Results(NamedTuple):
    y: Tensor
    dx: Tensor
    dshift: Tensor
    dscale: Tensor


def make(shape, device="cpu", dtype=torch.float32, modulation=None, out_dtype=None, mean=0.0, seed=0) -> Inputs:
    """x [B, N, D] or [N, D], shift and scale [B, D] or [D] of dtypes `modulation` (a pair; default x's), dy like y."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size, dtype):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)

    shift_dtype, scale_dtype = modulation or (dtype, dtype)
    table = (*shape[:-2], shape[-1])
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype).to(device)
    return Inputs(
        x, draw(*table, dtype=shift_dtype), draw(*table, dtype=scale_dtype), draw(*shape, dtype=out_dtype or dtype)
    )


def differentiate(function, inputs: Inputs, **options) -> Results:
    """y and the gradients, as `function` gives them; strides of the inputs are kept."""
    x, shift, scale = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    y = function(x, shift, scale, **options)
    return Results(y.detach(), *torch.autograd.grad(y, (x, shift, scale), inputs.dy))


def exact(inputs: Inputs, eps: float = 1e-6) -> Results:
    """The answer in float64."""
    return differentiate(reference.reference64, Inputs(*(tensor.double() for tensor in inputs)), eps=eps)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; absolute where the exact answer is nothing."""
    want = want.double()
    return float((got.double() - want).norm() / (want.norm() + (want.norm() == 0)))


def assert_close(got: Results, want: Results, bars: tuple[float, float]) -> None:
    """Relative errors within bars[0] for y and dx, bars[1] for dshift and dscale."""
    for name, g, w in zip(Results._fields, got, want, strict=True):
        assert g.shape == w.shape, f"{name}: shape {tuple(g.shape)}, want {tuple(w.shape)}"
        bar = bars[name in ("dshift", "dscale")]
        assert error(g, w) <= bar, f"{name}: relative error {error(g, w):.2e} above {bar:.0e}"


def assert_same_bits(a: Results, b: Results) -> None:
    for name, g, w in zip(Results._fields, a, b, strict=True):
        assert torch.equal(g, w), f"{name} differs between two runs"
