"""What LayerNorm-modulate means, in plain PyTorch: y = LN(x) * (1 + scale) + shift over the last dimension.

Legend: B samples, N rows (tokens) of a sample, D features. Every formula takes x [B, N, D] or [N, D] (one sample) with
modulation of any form that `repro.adaln.form` lists, and autograd differentiates it as often as asked. The gated
formulas take x and branch of one shape, and gate of shift's and scale's shape or None: h = x + gate * branch is
normalized in x's place, and both h and y are returned.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def eager(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> Tensor:
    """The textbook chain in the dtypes of its inputs (promoted where they differ), rounded at each step.

    Returns y with x's shape, in `out_dtype` or else x's dtype.
    """
    rows = _frames(x, scale)
    normalized = F.layer_norm(rows, x.shape[-1:], eps=eps)
    y = normalized * (1 + _per_row(scale, x)) + _per_row(shift, x)
    return _joined(y, x).to(out_dtype or x.dtype)


def wan(x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None) -> Tensor:
    """The Wan block's way: normalization and modulation in float32, one rounding at the end.

    Source: huggingface/diffusers, transformer_wan.py, WanTransformerBlock (`(norm(x.float()) * (1 + scale) +
    shift).type_as(x)`); the official code (Wan-Video/Wan2.1, wan/modules/model.py) normalizes and modulates in
    float32 too. Returns y with x's shape, in `out_dtype` or else x's dtype.
    """
    rows = _frames(x, scale)
    normalized = F.layer_norm(rows.float(), x.shape[-1:], eps=eps)
    y = normalized * (1 + _per_row(scale, x).float()) + _per_row(shift, x).float()
    return _joined(y, x).to(out_dtype or x.dtype)


def reference64(
    x: Tensor, shift: Tensor, scale: Tensor, eps: float = 1e-6, out_dtype: torch.dtype | None = None
) -> Tensor:
    """The judge: everything in float64, with gradients to match. Returns float64 unless `out_dtype` is given."""
    y = eager(x.double(), shift.double(), scale.double(), eps)
    return y if out_dtype is None else y.to(out_dtype)


def gated_eager(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The textbook gated residual, rounded at each step, then `eager`. Returns h in x's dtype, and y."""
    h = (x + _gated(branch, gate)).to(x.dtype)
    return h, eager(h, shift, scale, eps, out_dtype)


def gated_wan(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The Wan block's gated residual, then `wan`. Returns h in x's dtype, and y.

    Source: as `wan` (`(hidden_states.float() + attn_output * gate_msa).type_as(hidden_states)`, with gate in float32).
    """
    h = (x.float() + _gated(branch, None if gate is None else gate.float())).type_as(x)
    return h, wan(h, shift, scale, eps, out_dtype)


def gated_reference64(
    x: Tensor,
    branch: Tensor,
    gate: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """The judge of the gated formulas: everything in float64, h never rounded."""
    gate64 = None if gate is None else gate.double()
    return gated_eager(x.double(), branch.double(), gate64, shift.double(), scale.double(), eps)


def _gated(branch: Tensor, gate: Tensor | None) -> Tensor:
    """gate * branch, with branch's shape; branch itself where there is no gate."""
    if gate is None:
        return branch
    return _joined(_frames(branch, gate) * _per_row(gate, branch), branch)


def _frames(x: Tensor, modulation: Tensor) -> Tensor:
    """x with its rows by frame, [B, F, N / F, D], where there is a modulation for each frame; else x itself."""
    if modulation.dim() == x.dim() + 1:
        frames = modulation.shape[-3]
        return x.unflatten(-2, (frames, x.shape[-2] // frames))
    return x


def _joined(y: Tensor, x: Tensor) -> Tensor:
    """y with x's shape, frames joined if `_frames` took them apart; else y itself, with no node for autograd."""
    return y if y.dim() == x.dim() else y.flatten(-3, -2)


def _per_row(modulation: Tensor, x: Tensor) -> Tensor:
    """[B, D] as [B, 1, D]; anything that already broadcasts over x's rows as it is."""
    if modulation.dim() == x.dim() - 1 and x.dim() == 3:
        return modulation.unsqueeze(-2)
    return modulation
