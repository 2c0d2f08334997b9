"""The op's arithmetic in plain tensor operations: what runs on CPU, and on a GPU where the kernels cannot be built.

It keeps the kernels' promises: float32 arithmetic (float64 for float64 inputs), two-pass statistics, the same four
tensors for the backward, bitwise repeatable gradients. Temporaries stay small: rows are taken a chunk at a time.

Legend: B samples, N rows of a sample, D features.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Elements of x in a chunk: four or five float32 temporaries of 16 MB each at most.
_CHUNK = 1 << 22

# Inductor generates GPU code with Triton; cleared for good when it fails once.
_use_inductor = importlib.util.find_spec("triton") is not None


def run(formula: Callable[..., tuple[Tensor, Tensor, Tensor]], x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`forward` or `backward` below, on a GPU compiled by Inductor where that works.

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
) -> tuple[Tensor, Tensor, Tensor]:
    """y (contiguous, x's shape, `out_dtype` or x's dtype) and the row statistics mean and rstd, [B*N] each.

    inductor: compile the formula; the whole input is then one chunk.
    """
    x_BND = _samples(x)
    batch, rows, dim = x_BND.shape
    shift_B1D, scale_B1D = shift.view(batch, 1, dim), scale.view(batch, 1, dim)
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device)
    mean = torch.empty(batch * rows, dtype=statistics_dtype(x), device=x.device)
    rstd = torch.empty_like(mean)
    y_BND, mean_BN1, rstd_BN1 = _samples(y), mean.view(batch, rows, 1), rstd.view(batch, rows, 1)
    step = _compiled(_forward_into) if inductor else _forward_into
    for n in _chunks(x_BND, whole=inductor):
        step(y_BND[:, n], mean_BN1[:, n], rstd_BN1[:, n], x_BND[:, n], shift_B1D, scale_B1D, eps)
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    mean: Tensor,
    rstd: Tensor,
    shift_dtype: torch.dtype,
    inductor: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (contiguous, x's dtype), dshift and dscale (scale's shape) from what the forward saved."""
    x_BND, dy_BND = _samples(x), _samples(dy)
    batch, rows, dim = x_BND.shape
    scale_B1D = scale.view(batch, 1, dim)
    mean_BN1, rstd_BN1 = mean.view(batch, rows, 1), rstd.view(batch, rows, 1)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dx_BND = _samples(dx)
    # Sums over rows are kept at full precision across chunks and rounded once, at the end.
    dshift = torch.zeros((batch, 1, dim), dtype=mean.dtype, device=x.device)
    dscale = torch.zeros_like(dshift)
    step = _compiled(_backward_into) if inductor else _backward_into
    for n in _chunks(x_BND, whole=inductor):
        step(dx_BND[:, n], dshift, dscale, dy_BND[:, n], x_BND[:, n], scale_B1D, mean_BN1[:, n], rstd_BN1[:, n])
    return dx, dshift.to(shift_dtype).view(scale.shape), dscale.to(scale.dtype).view(scale.shape)


def _forward_into(y: Tensor, mean: Tensor, rstd: Tensor, x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> None:
    """Fill y, mean and rstd for the rows of x [B, n, D]; shift and scale [B, 1, D]."""
    x = x.to(mean.dtype)
    first = x.mean(-1, keepdim=True)
    centred = x - first
    # The first mean is off by a few units in the last place, which is not small where |mean| >> spread.
    correction = centred.mean(-1, keepdim=True)
    centred = centred - correction
    mean.copy_(first + correction)
    rstd.copy_(torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps))
    y.copy_(centred * rstd * (1 + scale.to(mean.dtype)) + shift.to(mean.dtype))


def _backward_into(
    dx: Tensor, dshift: Tensor, dscale: Tensor, dy: Tensor, x: Tensor, scale: Tensor, mean: Tensor, rstd: Tensor
) -> None:
    """Fill dx for the rows of x [B, n, D] and add the rows' share to dshift and dscale [B, 1, D].

    With g = dy * (1 + scale) and xhat = (x - mean) * rstd: dx = rstd * (g - mean_D(g) - xhat * mean_D(g * xhat)),
    dshift = sum_N dy, dscale = sum_N dy * xhat.
    """
    dy = dy.to(mean.dtype)
    normalized = (x.to(mean.dtype) - mean) * rstd
    g = dy * (1 + scale.to(mean.dtype))
    along = (g * normalized).mean(-1, keepdim=True)
    dx.copy_(rstd * (g - g.mean(-1, keepdim=True) - normalized * along))
    dshift.add_(dy.sum(1, keepdim=True))
    dscale.add_((dy * normalized).sum(1, keepdim=True))


def _samples(tensor: Tensor) -> Tensor:
    """x, y or a gradient of them as [B, N, D]; never a copy."""
    return tensor if tensor.dim() == 3 else tensor.unsqueeze(0)


def _chunks(x: Tensor, whole: bool) -> Iterator[slice]:
    """Slices of N that cover x [B, N, D]."""
    batch, rows, dim = x.shape
    step = max(1, rows if whole else _CHUNK // max(1, batch * dim))
    return (slice(start, start + step) for start in range(0, rows, step))


@functools.cache
def _compiled(step: Callable[..., None]) -> Callable[..., Any]:
    """`step` through Inductor. Shapes that vary become dynamic, so that a trainer's many buckets share one kernel."""
    return torch.compile(step)
