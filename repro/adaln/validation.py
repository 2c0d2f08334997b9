"""Argument checks of the public functions, in words. Calls that the extension takes for good never come here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from repro.adaln.form import form_of

CUDA_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IMPLS = ("fused", "dtile")


def check(x: Tensor, shift: Tensor, scale: Tensor, eps: float, out_dtype: torch.dtype | None, impl: str) -> None:
    """Check the arguments of `layer_norm_modulate`.

    Raises TypeError (types and dtypes) or ValueError (shapes, devices, values) that names the argument at fault.
    """
    _check(x, {}, {"scale": scale, "shift": shift}, eps, out_dtype)
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, got {impl!r}")


def check_gated(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float,
    out_dtype: torch.dtype | None,
) -> None:
    """Check the arguments of `gated_residual_layer_norm_modulate`; raises as `check`."""
    modulation = {"scale": scale, "shift": shift} | ({} if gate is None else {"gate": gate})
    _check(x, {"branch": branch}, modulation, eps, out_dtype)


def _check(
    x: Tensor, like_x: dict[str, Tensor], modulation: dict[str, Tensor], eps: float, out_dtype: torch.dtype | None
) -> None:
    others = like_x | modulation
    for name, tensor in ({"x": x} | others).items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    _check_shapes(x, like_x, modulation)
    _check_dtypes(x, {**{name: t.dtype for name, t in others.items()}, "out_dtype": out_dtype})
    for name, tensor in others.items():
        if tensor.device != x.device:
            raise ValueError(f"{name} must be on x's device {x.device}, got {tensor.device}")
    if not isinstance(eps, float | int):
        raise TypeError(f"eps must be a float, got {type(eps).__name__}")
    if not 0 < eps < math.inf:
        raise ValueError(f"eps must be positive and finite, got {eps}")


def _check_shapes(x: Tensor, like_x: dict[str, Tensor], modulation: dict[str, Tensor]) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"x must have shape [B, N, D] or [N, D], got {_show(x)}")
    if x.shape[-1] == 0:
        raise ValueError(f"x must have at least one feature (D >= 1), got shape {_show(x)}")
    for name, tensor in like_x.items():
        if tensor.shape != x.shape:
            raise ValueError(f"{name} must have x's shape {_show(x)}, got {_show(tensor)}")
    (name, first), *others = modulation.items()
    if form_of(x, first) is None:
        *samples, rows, dim = x.shape
        b = "".join(f"{n}, " for n in samples)
        raise ValueError(
            f"{name} must have shape [{b}{dim}] or [{b}1, {dim}] (per sample), [{b}{rows}, {dim}] (per token) or "
            f"[{b}F, 1, {dim}] with F dividing {rows} (per frame) for x {_show(x)}, got {_show(first)}"
        )
    for other, tensor in others:
        if tensor.shape != first.shape:
            raise ValueError(f"{other} must have the same shape as {name} {_show(first)}, got {_show(tensor)}")


def _check_dtypes(x: Tensor, others: dict[str, torch.dtype | None]) -> None:
    double = x.dtype == torch.float64 and not x.is_cuda
    if x.dtype not in CUDA_DTYPES and not double:
        where = " on a CUDA device (float64 is for the CPU)" if x.dtype == torch.float64 else ""
        raise TypeError(f"x must be bfloat16, float16 or float32, got {_name(x.dtype)}{where}")
    allowed = (*CUDA_DTYPES, torch.float64) if double else CUDA_DTYPES
    for name, dtype in others.items():
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
