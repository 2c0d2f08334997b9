"""Sizes of the models that costs are stated for, without PyTorch: widths, parameters and FLOPs of Wan 2.1.

Sizes from Wan-Video/Wan2.1, wan/configs/wan_t2v_1_3B.py and wan_t2v_14B.py; the structure they fill in is that of
wan/modules/model.py (every linear has a bias; q and k are RMS-normalised over the full width in both attentions).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TEXT_TOKENS = 512
"""Text tokens that every sample attends to; shorter prompts are zero-padded and the padding is attended too."""

TEXT_WIDTH = 4096
"""Features of a text token's embedding (umT5-XXL's)."""

TIME_FREQUENCIES = 256
"""Sines and cosines that a timestep is embedded in."""

LATENT_CHANNELS = 16
PATCH = (1, 2, 2)
"""Latent elements along time, height and width that one token stands for."""

_LATENT_PATCH = LATENT_CHANNELS * PATCH[0] * PATCH[1] * PATCH[2]


@dataclass(frozen=True)
class ModelSize:
    """Widths and depth of a video diffusion transformer.

    name: slug used in rows. dim: width of the residual stream. ffn: hidden width of the feed-forward network.
    heads: attention heads, each dim / heads wide. layers: blocks of the full model.

    Raises ValueError where a size is not positive or heads do not divide dim into an even head width.
    """

    name: str
    dim: int
    ffn: int
    heads: int
    layers: int

    def __post_init__(self) -> None:
        for field in ("dim", "ffn", "heads", "layers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} of {self.name} must be at least 1, got {getattr(self, field)}")
        if self.dim % (2 * self.heads):
            raise ValueError(f"dim {self.dim} of {self.name} must be a multiple of 2 * heads, got heads={self.heads}")

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: two attentions, feed-forward network, affine norm, modulation table."""
        d, f = self.dim, self.ffn
        attention = 4 * (d * d + d) + 2 * d
        return 2 * attention + (2 * d * f + f + d) + 2 * d + 6 * d

    @property
    def parameters(self) -> int:
        """Parameters of the full model, embeddings and head included."""
        d = self.dim
        patch = _LATENT_PATCH * d + d
        text = TEXT_WIDTH * d + d + d * d + d
        time = TIME_FREQUENCIES * d + d + d * d + d + 6 * (d * d + d)
        head = d * _LATENT_PATCH + _LATENT_PATCH + 2 * d
        return self.layers * self.block_parameters + patch + text + time + head

    def forward_flops(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Floating-point operations of one block's forward pass over `batch` samples of `tokens` tokens (broadcast).

        Linears on the video tokens, k and v on the text, scores and weighted sums of both attentions; a multiply-add
        counts as two. Training takes 3 times as many, 4 times with full activation checkpointing.
        """
        b, s = np.asarray(batch, np.float64), np.asarray(tokens, np.float64)
        d, f, t = float(self.dim), float(self.ffn), float(TEXT_TOKENS)
        return b * (s * (12 * d * d + 4 * d * f) + 4 * d * d * t + 4 * t * s * d + 4 * s * s * d)


WAN_1_3B = ModelSize("wan-1.3b", dim=1536, ffn=8960, heads=12, layers=30)
WAN_14B = ModelSize("wan-14b", dim=5120, ffn=13824, heads=40, layers=40)
TINY = ModelSize("tiny", dim=96, ffn=192, heads=2, layers=2)
"""For smoke runs and tests: nobody trains it."""

MODELS: dict[str, ModelSize] = {m.name: m for m in (WAN_1_3B, WAN_14B, TINY)}
