"""Argument checks of the public function. They run on every call, so the accepted case is a handful of comparisons."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IMPLS = ("fused", "dtile")


def check(x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str) -> None:
    """Raise TypeError (types and dtypes) or ValueError (shapes, devices, values) that names the argument at fault."""
    for name, tensor in (("x", x), ("shift", shift), ("scale", scale)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    _check_shapes(x, shift, scale)
    _check_dtypes(x, shift, scale, out_dtype)
    device = x.device
    if shift.device != device or scale.device != device:
        raise ValueError(
            f"shift and scale must be on x's device {device}, got shift on {shift.device} and scale on {scale.device}"
        )
    if not isinstance(eps, float | int):
        raise TypeError(f"eps must be a float, got {type(eps).__name__}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps}")
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, got {impl!r}")


def _check_shapes(x: Tensor, shift: Tensor, scale: Tensor) -> None:
    if x.dim() == 3:
        batch, _, dim = x.shape
        fits = scale.shape == (batch, dim) or scale.shape == (batch, 1, dim)
    elif x.dim() == 2:
        dim = x.shape[1]
        fits = scale.shape == (dim,) or scale.shape == (1, dim)
    else:
        raise ValueError(f"x must have shape [B, N, D] or [N, D], got {_show(x)}")
    if dim == 0:
        raise ValueError(f"x must have at least one feature (D >= 1), got shape {_show(x)}")
    if fits and shift.shape == scale.shape:
        return
    wanted = f"[{x.shape[0]}, {dim}] or [{x.shape[0]}, 1, {dim}]" if x.dim() == 3 else f"[{dim}] or [1, {dim}]"
    name, got = ("scale", scale) if not fits else ("shift", shift)
    also = "" if not fits else f", the same as scale {_show(scale)}"
    raise ValueError(f"{name} must have shape {wanted} for x {_show(x)}{also}, got {_show(got)}")


def _check_dtypes(x: Tensor, shift: Tensor, scale: Tensor, out_dtype: torch.dtype | None) -> None:
    double = x.dtype == torch.float64 and not x.is_cuda
    if x.dtype not in CUDA_DTYPES and not double:
        where = " on a CUDA device (float64 is for the CPU)" if x.dtype == torch.float64 else ""
        raise TypeError(f"x must be bfloat16, float16 or float32, got {_name(x.dtype)}{where}")
    allowed = (*CUDA_DTYPES, torch.float64) if double else CUDA_DTYPES
    for name, dtype in (("shift", shift.dtype), ("scale", scale.dtype), ("out_dtype", out_dtype)):
        if dtype in allowed or (dtype is None and name == "out_dtype"):
            continue
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype or None, got {type(dtype).__name__}")
        names = ", ".join(map(_name, allowed))
        raise TypeError(f"{name} must be one of {names} for x of dtype {_name(x.dtype)}, got {_name(dtype)}")


def _show(tensor: Tensor) -> str:
    return str(list(tensor.shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
