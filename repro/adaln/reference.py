"""What LayerNorm-modulate means, in plain PyTorch: y = LN(x) * (1 + scale) + shift over the last dimension.

Legend: B samples, N rows (tokens) of a sample, D features. Every formula takes x [B, N, D] with shift and scale
[B, D] or [B, 1, D], or x [N, D] (one sample) with [D] or [1, D], and autograd differentiates it as often as asked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def eager(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> Tensor:
    """The textbook chain in the dtypes of its inputs (promoted where they differ), rounded at each step.

    Returns y with x's shape, in `out_dtype` or else x's dtype.
    """
    normalized = F.layer_norm(x, x.shape[-1:], eps=eps)
    y = normalized * (1 + _per_row(scale, x)) + _per_row(shift, x)
    return y.to(out_dtype or x.dtype)


def wan(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> Tensor:
    """The Wan block's way: normalization and modulation in float32, one rounding at the end.

    Source: huggingface/diffusers, transformer_wan.py, WanTransformerBlock (`(norm(x.float()) * (1 + scale) +
    shift).type_as(x)`); the official code (Wan-Video/Wan2.1, wan/modules/model.py) normalizes and modulates in
    float32 too. Returns y with x's shape, in `out_dtype` or else x's dtype.
    """
    normalized = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    y = normalized * (1 + _per_row(scale, x).float()) + _per_row(shift, x).float()
    return y.to(out_dtype or x.dtype)


def reference64(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The judge: everything in float64, with gradients to match. Returns float64 unless `out_dtype` is given."""
    y = eager(x.double(), shift.double(), scale.double(), eps)
    return y if out_dtype is None else y.to(out_dtype)


def _per_row(modulation: Tensor, x: Tensor) -> Tensor:
    """[B, D] as [B, 1, D]; anything that already broadcasts over x's rows as it is."""
    if modulation.dim() == x.dim() - 1 and x.dim() == 3:
        return modulation.unsqueeze(-2)
    return modulation
