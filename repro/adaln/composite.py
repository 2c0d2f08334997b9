"""The op's arithmetic in plain tensor operations: what runs on CPU, and on a GPU where the kernels cannot be built.

It keeps the kernels' promises: float32 arithmetic (float64 for float64 inputs), two-pass statistics, the same
tensors for the backward, bitwise repeatable gradients. Temporaries stay small: rows are taken a chunk at a time.

Legend: B samples, N rows of a sample, D features; frames with a modulation each are samples (`repro.adaln.form`).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from repro.adaln.form import Form, form_of

logger = logging.getLogger(__name__)

# Elements of x in a chunk: four or five float32 temporaries of 16 MB each at most.
_CHUNK = 1 << 22

# Inductor generates GPU code with Triton; cleared for good when it fails once.
_use_inductor = importlib.util.find_spec("triton") is not None


def run(formula: Callable[..., Any], x: Tensor, *args: Any) -> Any:
    """One of the four formulas below, on a GPU compiled by Inductor where that works. x: its first argument.

    CPU calls are not worth the wait for a compiler.
    """
    global _use_inductor
    with torch.no_grad():
        if x.is_cuda and _use_inductor:
            try:
                return formula(x, *args, inductor=True)
            except torch.OutOfMemoryError:
                raise
            except Exception:  # Triton needs a C compiler as well, and fails in as many ways as there are machines
                logger.info("Inductor failed: the AdaLN composite runs uncompiled from here on", exc_info=True)
                _use_inductor = False
        return formula(x, *args)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """dtype of mean and rstd, and of all arithmetic: float64 for float64 input, float32 for every other."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def forward(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, inductor: bool = False
) -> tuple[Tensor, Tensor]:
    """y (contiguous, x's shape, `out_dtype` or x's dtype) and the row statistics, [2, B*N]: mean, then rstd.

    inductor: compile the formula; the whole input is then one chunk.
    """
    return _forward(x, None, None, shift, scale, eps, out_dtype, inductor)[1:]


def gated_forward(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    out_dtype: torch.dtype | None,
    inductor: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """h = x + gate * branch (contiguous, x's dtype), and y and statistics of h as `forward` gives them."""
    return _forward(x, branch, gate, shift, scale, eps, out_dtype, inductor)


def backward(
    dy: Tensor, x: Tensor, scale: Tensor, statistics: Tensor, shift_dtype: torch.dtype, inductor: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (contiguous, x's dtype), dshift and dscale (scale's shape) from what the forward saved.

    Per token dshift is dy; it comes flat and empty.
    """
    dx, _, _, dshift, dscale = _backward(dy, None, x, None, None, scale, statistics, shift_dtype, inductor)
    return dx, dshift, dscale


def gated_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    statistics: Tensor,
    shift_dtype: torch.dtype,
    inductor: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dx, dbranch, dgate, dshift and dscale, from the gradients of y and h and what the forward saved.

    branch and gate come together. Without them dbranch is dx; it comes flat and empty, as dgate.
    """
    return _backward(dy, dh, h, branch, gate, scale, statistics, shift_dtype, inductor)


def _forward(
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    out_dtype: torch.dtype | None,
    inductor: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    form = _form(x, scale)
    h = x if branch is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    statistics = torch.empty(2, form.batch * form.rows, dtype=statistics_dtype(x), device=x.device)
    mean, rstd = statistics.view(2, form.batch, form.rows, 1).unbind()
    rows = [None if t is None else form.rows_of(t) for t in (h, y, x, branch)]
    modulation = [None if m is None else form.modulation_of(m) for m in (gate, shift, scale)]
    step: Callable[..., None] = _compiled(_forward_into) if inductor else _forward_into
    for n in _chunks(form, x.shape[-1], whole=inductor):
        step(mean[:, n], rstd[:, n], *_at(rows, n), *_at(modulation, n if form.per_token else slice(None)), eps)
    return h, y, statistics


def _backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    statistics: Tensor,
    shift_dtype: torch.dtype,
    inductor: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    form = _form(h, scale)

    def gradient(dtype: torch.dtype) -> Tensor:
        if form.per_token:
            return torch.empty(form.batch, form.rows, h.shape[-1], dtype=dtype, device=h.device)
        # Sums over rows are kept at full precision across chunks and rounded once, at the end.
        return torch.zeros(form.batch, 1, h.shape[-1], dtype=statistics.dtype, device=h.device)

    def rounded(total: Tensor | None, dtype: torch.dtype) -> Tensor:
        return h.new_empty(0, dtype=dtype) if total is None else total.to(dtype).view(scale.shape)

    mean, rstd = statistics.view(2, form.batch, form.rows, 1).unbind()
    dx = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    dbranch = None if branch is None else torch.empty(h.shape, dtype=branch.dtype, device=h.device)
    rows = [None if t is None else form.rows_of(t) for t in (dx, dbranch, dy, dh, h, branch)]
    modulation = [None if m is None else form.modulation_of(m) for m in (gate, scale)]
    totals = [
        None if gate is None else gradient(gate.dtype),
        None if form.per_token else gradient(shift_dtype),
        gradient(scale.dtype),
    ]
    step: Callable[..., None] = _compiled(_backward_into) if inductor else _backward_into
    for n in _chunks(form, h.shape[-1], whole=inductor):
        of_rows = n if form.per_token else slice(None)
        step(mean[:, n], rstd[:, n], *_at(rows, n), *_at(modulation, of_rows), *_at(totals, of_rows), form.per_token)
    dgate, dshift, dscale = totals
    return (
        dx,
        h.new_empty(0) if dbranch is None else dbranch,
        rounded(dgate, h.dtype if gate is None else gate.dtype),
        rounded(dshift, shift_dtype),
        rounded(dscale, scale.dtype),
    )


def _forward_into(
    mean: Tensor,
    rstd: Tensor,
    h: Tensor,
    y: Tensor,
    x: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
) -> None:
    """Fill mean, rstd, y and, with a branch, h for the rows of x [B, n, D]; modulation [B, 1 or n, D]."""
    if branch is not None:
        added = branch.to(mean.dtype) if gate is None else gate.to(mean.dtype) * branch.to(mean.dtype)
        h.copy_(x.to(mean.dtype) + added)
    wide = h.to(mean.dtype)
    first = wide.mean(-1, keepdim=True)
    centred = wide - first
    # The first mean is off by a few units in the last place, which is not small where |mean| >> spread.
    correction = centred.mean(-1, keepdim=True)
    centred = centred - correction
    mean.copy_(first + correction)
    rstd.copy_(torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps))
    y.copy_(centred * rstd * (1 + scale.to(mean.dtype)) + shift.to(mean.dtype))


def _backward_into(
    mean: Tensor,
    rstd: Tensor,
    dx: Tensor,
    dbranch: Tensor | None,
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    dgate: Tensor | None,
    dshift: Tensor | None,
    dscale: Tensor,
    per_token: bool,
) -> None:
    """Fill dx and dbranch for the rows of h [B, n, D]; add the rows' share to dgate, dshift and dscale [B, 1, D].

    With g = dy * (1 + scale) and hhat = (h - mean) * rstd: dx = dh + rstd * (g - mean_D(g) - hhat * mean_D(g * hhat)),
    dbranch = gate * dx, dgate = sum_N dx * branch, dshift = sum_N dy, dscale = sum_N dy * hhat. Per token nothing is
    summed, and dgate and dscale are [B, n, D].
    """
    dy = dy.to(mean.dtype)
    normalized = (h.to(mean.dtype) - mean) * rstd
    g = dy * (1 + scale.to(mean.dtype))
    along = (g * normalized).mean(-1, keepdim=True)
    total = rstd * (g - g.mean(-1, keepdim=True) - normalized * along)
    if dh is not None:
        total = total + dh.to(mean.dtype)
    dx.copy_(total)
    shares = [(dshift, dy), (dscale, dy * normalized)]
    if dbranch is not None and branch is not None and gate is not None:
        dbranch.copy_(total * gate.to(mean.dtype))
        shares.append((dgate, total * branch.to(mean.dtype)))
    for into, share in shares:
        if per_token and into is not None:
            into.copy_(share)
        elif into is not None:
            into.add_(share.sum(1, keepdim=True))


def _form(x: Tensor, scale: Tensor) -> Form:
    form = form_of(x, scale)
    if form is None:
        raise ValueError(f"modulation {list(scale.shape)} does not fit x {list(x.shape)}")
    return form


def _at(tensors: list[Tensor | None], n: slice) -> list[Tensor | None]:
    return [None if t is None else t[:, n] for t in tensors]


def _chunks(form: Form, dim: int, whole: bool) -> Iterator[slice]:
    """Slices of the rows of all samples."""
    step = max(1, form.rows if whole else _CHUNK // max(1, form.batch * dim))
    return (slice(start, start + step) for start in range(0, form.rows, step))


@functools.cache
def _compiled(step: Callable[..., None]) -> Callable[..., Any]:
    """`step` through Inductor. Shapes that vary become dynamic, so that a trainer's many buckets share one kernel."""
    return torch.compile(step)
