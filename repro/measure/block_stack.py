"""A plain stack of Wan 2.1 blocks: what `block_time` times, and the yardstick for step time against shape.

Weights are bf16, as a sharded engine with bf16 mixed precision gathers them; modulation tables stay fp32. Nothing is
compiled: both reference code bases train in eager mode. The attention backend is PyTorch's own choice.

Legend: B samples, S video tokens of each, T text tokens, D width, H heads, K = D / H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from repro.balance.models import ModelSize
from repro.wan.block import Block, NormModulate


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
