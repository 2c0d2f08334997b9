"""Inputs for the op, its float64 answer, and the distance between the two.

The bars (relative error in the 2-norm against float64, unit-scale inputs): float32 1e-6 for what has x's shape, 1e-5
for sums over rows; bfloat16 4e-3, its unit roundoff 2^-8, of which one rounding uses less than half in the norm;
float16 an eighth of that.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from repro.adaln import reference

BARS = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (4e-3, 4e-3), torch.float16: (5e-4, 5e-4)}
HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF)

FORMS = ("per_sample", "per_token", "per_frame")
SUMS = ("dshift", "dscale", "dgate")


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


class GatedInputs(NamedTuple):
    x: Tensor
    branch: Tensor
    gate: Tensor | None
    shift: Tensor
    scale: Tensor
    dh: Tensor | None
    dy: Tensor | None


class GatedResults(NamedTuple):
    h: Tensor
    y: Tensor
    dx: Tensor
    dbranch: Tensor
    dgate: Tensor | None
    dshift: Tensor | None
    dscale: Tensor | None


def modulation_shape(shape, form="per_sample", frames=None):
    """Shape of a modulation of x `shape`; per frame, with that many frames (default: of at most two rows)."""
    *samples, rows, dim = shape
    match form:
        case "per_sample":
            return (*samples, dim)
        case "per_token":
            return tuple(shape)
        case "per_frame":
            return (*samples, frames or max(1, rows // 2 if rows % 2 == 0 else rows), 1, dim)
    raise ValueError(form)


def _draw(generator, device):
    def draw(*size, dtype):
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype).to(device)

    return draw


def make(
    shape,
    device="cpu",
    dtype=torch.float32,
    modulation=None,
    out_dtype=None,
    mean=0.0,
    seed=0,
    form="per_sample",
    frames=None,
) -> Inputs:
    """x [B, N, D] or [N, D], shift and scale of that form and in dtypes `modulation` (default x's), dy like y."""
    generator = torch.Generator().manual_seed(seed)
    draw = _draw(generator, device)
    shift_dtype, scale_dtype = modulation or (dtype, dtype)
    table = modulation_shape(shape, form, frames)
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype).to(device)
    return Inputs(
        x, draw(*table, dtype=shift_dtype), draw(*table, dtype=scale_dtype), draw(*shape, dtype=out_dtype or dtype)
    )


def make_gated(
    shape,
    device="cpu",
    dtype=torch.float32,
    branch=None,
    modulation=None,
    out_dtype=None,
    seed=0,
    form="per_sample",
    frames=None,
    gated=True,
) -> GatedInputs:
    """As `make`, with a branch, a gate if `gated`, and dh. Dtypes: of branch, and of (gate, shift, scale)."""
    draw = _draw(torch.Generator().manual_seed(seed), device)
    gate_dtype, shift_dtype, scale_dtype = modulation or (dtype,) * 3
    table = modulation_shape(shape, form, frames)
    gate = draw(*table, dtype=gate_dtype)
    return GatedInputs(
        draw(*shape, dtype=dtype),
        draw(*shape, dtype=branch or dtype),
        gate if gated else None,
        draw(*table, dtype=shift_dtype),
        draw(*table, dtype=scale_dtype),
        draw(*shape, dtype=dtype),
        draw(*shape, dtype=out_dtype or dtype),
    )


def differentiate(function, inputs: Inputs, **options) -> Results:
    """y and the gradients, as `function` gives them; strides of the inputs are kept."""
    x, shift, scale = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    y = function(x, shift, scale, **options)
    return Results(y.detach(), *torch.autograd.grad(y, (x, shift, scale), inputs.dy))


def differentiate_gated(function, inputs: GatedInputs, **options) -> GatedResults:
    """h, y and the gradients, as `function` gives them; only the outputs that `inputs` has a gradient for count."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs[:5]]
    h, y = function(*leaves, **options)
    outputs = [(o, d) for o, d in ((h, inputs.dh), (y, inputs.dy)) if d is not None]
    wanted = [t for t in leaves if t is not None]
    gradients = iter(torch.autograd.grad([o for o, _ in outputs], wanted, [d for _, d in outputs], allow_unused=True))
    return GatedResults(h.detach(), y.detach(), *(None if t is None else next(gradients) for t in leaves))


def exact(inputs: Inputs, eps: float = 1e-6) -> Results:
    """The answer in float64."""
    return differentiate(reference.reference64, Inputs(*(tensor.double() for tensor in inputs)), eps=eps)


def exact_gated(inputs: GatedInputs, h: Tensor, eps: float = 1e-6) -> GatedResults:
    """The answer in float64, but for what h was rounded to, which is what the norm and its gradients are of."""
    x, branch, gate, shift, scale, dh, dy = (None if t is None else t.double() for t in inputs)
    dh = torch.zeros_like(x) if dh is None else dh
    dy = torch.zeros_like(x) if dy is None else dy
    norm = differentiate(reference.reference64, Inputs(h.double(), shift, scale, dy), eps=eps)
    sums = differentiate_gated(
        lambda *leaves: (reference.gated_reference64(*leaves)[0], leaves[3] + leaves[4]),
        GatedInputs(x, branch, gate, shift, scale, dh + norm.dx, torch.zeros_like(shift)),
    )
    return GatedResults(sums.h, norm.y, sums.dx, sums.dbranch, sums.dgate, norm.dshift, norm.dscale)


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; absolute where the exact answer is nothing."""
    want = want.double()
    return float((got.double() - want).norm() / (want.norm() + (want.norm() == 0)))


def assert_close(got: Results | GatedResults, want: Results | GatedResults, bars: tuple[float, float]) -> None:
    """Relative errors within bars[1] for sums over rows, bars[0] for the rest."""
    for name, g, w in zip(got._fields, got, want, strict=True):
        assert (g is None) == (w is None), name
        if w is not None:
            assert g.shape == w.shape, f"{name}: shape {tuple(g.shape)}, want {tuple(w.shape)}"
            bar = bars[name in SUMS]
            assert error(g, w) <= bar, f"{name}: relative error {error(g, w):.2e} above {bar:.0e}"


def assert_close_by_dtype(got: Results | GatedResults, want: Results | GatedResults, factor: float = 1.0) -> None:
    """Relative errors within `factor` times the bar of each result's own dtype."""
    for name, g, w in zip(got._fields, got, want, strict=True):
        if w is not None:
            bar = factor * BARS[g.dtype][name in SUMS]
            assert g.shape == w.shape and error(g, w) <= bar, (
                f"{name}: relative error {error(g, w):.2e} above {bar:.0e}"
            )


def assert_same_bits(a: Results | GatedResults, b: Results | GatedResults) -> None:
    for name, g, w in zip(a._fields, a, b, strict=True):
        assert (g is None and w is None) or torch.equal(g, w), f"{name} differs between two runs"


def rows_apart(x: Tensor) -> Tensor:
    """The same values in a wider table, off its start: rows apart, and not aligned to vectors."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 5), float("nan"))
    wide[..., 1 : 1 + x.shape[-1]] = x
    return wide[..., 1 : 1 + x.shape[-1]]


LAYOUTS = {
    "contiguous": lambda x: x,
    "row_stride": rows_apart,
    "every_other_row": lambda x: x.repeat_interleave(2, -2)[..., ::2, :],
    "features_first": lambda x: x.mT.contiguous().mT,
    "batch_inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "feature_stride": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}
"""Strides that a tensor of x's shape or a modulation may arrive with; values are kept."""
