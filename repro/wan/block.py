"""The Wan 2.1 transformer block.

Structure and parameter names are those of Wan-Video/Wan2.1, wan/modules/model.py (WanAttentionBlock); precision is that
of Diffusers' transformer_wan.py: the residual stream in the compute dtype; norms, modulation and gates in fp32 (float64
for float64), rounded once. Parameters may have any floating dtype, each its own, so the block runs with everything in
fp32, with bf16 matrices beside fp32 tables, or as a sharded engine gathers it, all in bf16.

Legend: B samples, S video tokens of each, T text tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro.balance.models import ModelSize
from repro.wan.rope import rotate

EPS = 1e-6

NormModulate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_BSD, shift_B1D, scale_B1D) -> LN(x) * (1 + scale) + shift in x's dtype."""


def wide(t: Tensor) -> Tensor:
    """t in the dtype that norms, modulation and losses are computed in: fp32, or float64 for float64."""
    return t if t.dtype == torch.float64 else t.float()


class Attention(nn.Module):
    """Multi-head attention with q and k RMS-normalised over the full width before the heads are split."""

    def __init__(
        self, dim: int, heads: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, device=device, dtype=dtype) for _ in range(4))
        self.norm_q = nn.RMSNorm(dim, eps=EPS, device=device, dtype=dtype)
        self.norm_k = nn.RMSNorm(dim, eps=EPS, device=device, dtype=dtype)

    def forward(self, x_BSD: Tensor, context_BTD: Tensor, rope_S1K: Tensor | None) -> Tensor:
        """[B, S, D]: x attends to context (x itself for self-attention); rope_S1K, where given, rotates q and k."""
        q, k, v = (
            t.unflatten(-1, (self.heads, -1))
            for t in (self.norm_q(self.q(x_BSD)), self.norm_k(self.k(context_BTD)), self.v(context_BTD))
        )
        if rope_S1K is not None:
            q, k = rotate(q, rope_S1K), rotate(k, rope_S1K)
        y_BHSK = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y_BHSK.transpose(1, 2).flatten(2))


class WideLayerNorm(nn.LayerNorm):
    """Affine LayerNorm computed in `wide` precision and rounded once, to x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(wide(x), self.normalized_shape, wide(self.weight), wide(self.bias), self.eps)
        return y.type_as(x)


class Block(nn.Module):
    """Self-attention and FFN under AdaLN modulation and gates, cross-attention under an affine norm.

    The norms before self-attention and FFN (norm1 and norm2 in the official code) have no parameters: they are
    `norm_modulate`, which may be swapped at any time. dtype: of the matrices and of q's and k's norms; the modulation
    table and norm3 are fp32 unless the whole block is float64.
    """

    def __init__(
        self,
        size: ModelSize,
        norm_modulate: NormModulate,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        d = size.dim
        table = torch.float64 if dtype == torch.float64 else torch.float32
        self.norm_modulate = norm_modulate
        self.self_attn = Attention(d, size.heads, device, dtype)
        self.cross_attn = Attention(d, size.heads, device, dtype)
        self.norm3 = WideLayerNorm(d, eps=EPS, device=device, dtype=table)
        self.ffn = nn.Sequential(
            nn.Linear(d, size.ffn, device=device, dtype=dtype),
            nn.GELU(approximate="tanh"),
            nn.Linear(size.ffn, d, device=device, dtype=dtype),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, d, device=device, dtype=table) / d**0.5)

    def forward(self, x_BSD: Tensor, time_B6D: Tensor, text_BTD: Tensor, rope_S1K: Tensor) -> Tensor:
        """One block. x, text and the matrices share a dtype; rope is complex. Returns [B, S, D] in x's dtype."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (wide(self.modulation) + time_B6D).chunk(6, dim=1)
        h = self.norm_modulate(x_BSD, shift_a, scale_a)
        x_BSD = _gated(x_BSD, self.self_attn(h, h, rope_S1K), gate_a)
        x_BSD = x_BSD + self.cross_attn(self.norm3(x_BSD), text_BTD, None)
        return _gated(x_BSD, self.ffn(self.norm_modulate(x_BSD, shift_f, scale_f)), gate_f)


def _gated(x_BSD: Tensor, y_BSD: Tensor, gate_B1D: Tensor) -> Tensor:
    return (wide(x_BSD) + y_BSD * gate_B1D).type_as(x_BSD)
