"""Rotary position embedding over a (time, height, width) grid of tokens, as in Wan 2.1.

Legend: B samples, S tokens, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

THETA = 1e4


def rope_table(
    grid: tuple[int, int, int],
    head_dim: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.complex64,
) -> Tensor:
    """Rotary factors of a (time, height, width) grid of tokens: complex [S, 1, K/2], S = t * h * w, time-major.

    Each axis owns a share of the K/2 frequencies: h and w get 2 * (K // 6) features each, t the rest (44/42/42 at
    K = 128), with theta 1e4 (Wan2.1 wan/modules/model.py, `rope_params`). Angles are float64, rounded once.
    """
    spatial = 2 * (head_dim // 6)
    angles = []
    for axis, (n, features) in enumerate(zip(grid, (head_dim - 2 * spatial, spatial, spatial), strict=True)):
        frequencies = THETA ** -(torch.arange(0, features, 2, dtype=torch.float64, device=device) / features)
        angle = torch.arange(n, dtype=torch.float64, device=device)[:, None] * frequencies
        view = [1, 1, 1, features // 2]
        view[axis] = n
        angles.append(angle.view(view).expand(*grid, features // 2))
    angle_SK = torch.cat(angles, dim=-1).reshape(-1, 1, head_dim // 2)
    return torch.polar(torch.ones_like(angle_SK), angle_SK).to(dtype)


def rotate(x_BSHK: Tensor, rope_S1K: Tensor) -> Tensor:
    """x [B, S, H, K] with neighbouring features turned as complex numbers by rope [S, 1, K/2]; x's dtype."""
    if torch.compiler.is_compiling():
        # Inductor generates no code for complex numbers, so the same product is spelled out for it.
        real, imag = x_BSHK.to(rope_S1K.real.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = torch.view_as_real(rope_S1K).unbind(-1)
        turned = torch.stack((real * cos - imag * sin, real * sin + imag * cos), dim=-1)
        return turned.flatten(-2).type_as(x_BSHK)
    pairs = torch.view_as_complex(x_BSHK.to(rope_S1K.real.dtype).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope_S1K).flatten(-2).type_as(x_BSHK)
