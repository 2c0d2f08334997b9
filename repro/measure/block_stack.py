"""A plain stack of Wan 2.1 blocks: what `block_time` times, and the yardstick for step time against shape.

The block follows Wan-Video/Wan2.1 wan/modules/model.py (WanAttentionBlock) in structure and Diffusers'
transformer_wan.py in precision: bf16 residual stream, norms, modulation and gates computed in fp32 and rounded once.
Weights are bf16, as a sharded engine with bf16 mixed precision gathers them; modulation tables stay fp32. Nothing is
compiled: both reference code bases train in eager mode. The attention backend is PyTorch's own choice.

Legend: B samples, S video tokens of each, T text tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.balance.models import ModelSize

EPS = 1e-6
ROPE_THETA = 1e4

NormModulate = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x_BSD, shift_B1D, scale_B1D) -> LN(x) * (1 + scale) + shift in x's dtype."""


def rope_table(grid: tuple[int, int, int], head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Rotary factors of a (time, height, width) grid of tokens: complex64 [S, 1, K/2], S = t * h * w, time-major.

    Each axis owns a share of the K/2 frequencies: h and w get 2 * (K // 6) features each, t the rest (44/42/42 at
    K = 128), with theta 1e4 (Wan2.1 wan/modules/model.py, `rope_params`).
    """
    spatial = 2 * (head_dim // 6)
    angles = []
    for axis, (n, features) in enumerate(zip(grid, (head_dim - 2 * spatial, spatial, spatial), strict=True)):
        frequencies = ROPE_THETA ** -(torch.arange(0, features, 2, dtype=torch.float64, device=device) / features)
        angle = torch.arange(n, dtype=torch.float64, device=device)[:, None] * frequencies
        view = [1, 1, 1, features // 2]
        view[axis] = n
        angles.append(angle.view(view).expand(*grid, features // 2))
    angle_SK = torch.cat(angles, dim=-1).reshape(-1, 1, head_dim // 2)
    return torch.polar(torch.ones_like(angle_SK), angle_SK).to(torch.complex64)


def _rotate(x_BSHK: Tensor, rope_S1K: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x_BSHK.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rope_S1K).flatten(-2).type_as(x_BSHK)


class Attention(nn.Module):
    """Multi-head attention with q and k RMS-normalised over the full width before the heads are split."""

    def __init__(self, dim: int, heads: int, device: torch.device | str, dtype: torch.dtype) -> None:
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
            q, k = _rotate(q, rope_S1K), _rotate(k, rope_S1K)
        y_BHSK = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y_BHSK.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Self-attention and FFN under AdaLN modulation and gates, cross-attention under an affine norm."""

    def __init__(self, size: ModelSize, norm_modulate: NormModulate, device: torch.device | str, dtype: torch.dtype):
        super().__init__()
        d = size.dim
        self.norm_modulate = norm_modulate
        self.self_attention = Attention(d, size.heads, device, dtype)
        self.cross_attention = Attention(d, size.heads, device, dtype)
        self.cross_norm = nn.LayerNorm(d, eps=EPS, device=device, dtype=torch.float32)
        self.ffn = nn.Sequential(
            nn.Linear(d, size.ffn, device=device, dtype=dtype),
            nn.GELU(approximate="tanh"),
            nn.Linear(size.ffn, d, device=device, dtype=dtype),
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, d, device=device, dtype=torch.float32) / d**0.5)

    def forward(self, x_BSD: Tensor, time_B6D: Tensor, text_BTD: Tensor, rope_S1K: Tensor) -> Tensor:
        """One block; time_B6D is fp32, the rest bf16 (rope complex64). Returns [B, S, D] in x's dtype."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = (self.modulation + time_B6D).chunk(6, dim=1)
        h = self.norm_modulate(x_BSD, shift_a, scale_a)
        x_BSD = _gated(x_BSD, self.self_attention(h, h, rope_S1K), gate_a)
        h = self.cross_norm(x_BSD.float()).type_as(x_BSD)
        x_BSD = x_BSD + self.cross_attention(h, text_BTD, None)
        return _gated(x_BSD, self.ffn(self.norm_modulate(x_BSD, shift_f, scale_f)), gate_f)


def _gated(x_BSD: Tensor, y_BSD: Tensor, gate_B1D: Tensor) -> Tensor:
    return (x_BSD.float() + y_BSD * gate_B1D).type_as(x_BSD)


class BlockStack(nn.Module):
    """`layers` blocks of `size`, each one recomputed in the backward pass (full activation checkpointing).

    norm_modulate: the AdaLN implementation, swappable afterwards through `use`.
    """

    def __init__(
        self,
        size: ModelSize,
        layers: int,
        norm_modulate: NormModulate,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.size = size
        self.blocks = nn.ModuleList(Block(size, norm_modulate, device, dtype) for _ in range(layers))

    def use(self, norm_modulate: NormModulate) -> None:
        """Switch every block to another AdaLN implementation."""
        for block in self.blocks:
            assert isinstance(block, Block)
            block.norm_modulate = norm_modulate

    def forward(self, x_BSD: Tensor, time_B6D: Tensor, text_BTD: Tensor, rope_S1K: Tensor) -> Tensor:
        """x [B, S, D], time embedding [B, 6, D] fp32, text [B, T, D], rope [S, 1, K/2] -> [B, S, D] in x's dtype."""
        for block in self.blocks:
            # No dropout anywhere, so the recomputation needs no random state.
            x_BSD = checkpoint(
                block, x_BSD, time_B6D, text_BTD, rope_S1K, use_reentrant=False, preserve_rng_state=False
            )
        return x_BSD
