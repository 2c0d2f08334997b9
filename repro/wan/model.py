"""Wan 2.1's text-to-video transformer, with the AdaLN implementation as an option.

Parameter names are those of Wan-Video/Wan2.1, wan/modules/model.py; `repro.wan.convert` maps them to Diffusers'.

Legend: B samples, C latent channels, [T, H, W] latent grid, S tokens, L text tokens, D width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from repro.adaln import get_impl
from repro.balance.models import LATENT_CHANNELS, PATCH, TEXT_WIDTH, TIME_FREQUENCIES
from repro.wan.block import Block, NormModulate, wide
from repro.wan.config import WanConfig
from repro.wan.initialize import initialize
from repro.wan.rope import rope_table


class PatchEmbedding(nn.Conv3d):
    """[B, C, T, H, W] -> [B, S, D]: a convolution whose stride equals its kernel, done as one product over patches."""

    def __init__(self, dim: int) -> None:
        super().__init__(LATENT_CHANNELS, dim, kernel_size=PATCH, stride=PATCH)

    def forward(self, latents: Tensor) -> Tensor:
        return F.linear(patchify(latents.to(self.weight.dtype)), self.weight.flatten(1), self.bias)


class Embedding(nn.Sequential):
    """A small network that takes its input in the dtype of its own weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(next(self.parameters()).dtype))


class Head(nn.Module):
    """Modulated norm, then the projection of each token to its patch."""

    def __init__(self, dim: int, norm_modulate: NormModulate) -> None:
        super().__init__()
        self.norm_modulate = norm_modulate
        self.head = nn.Linear(dim, LATENT_CHANNELS * math.prod(PATCH))
        self.modulation = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)

    def forward(self, x_BSD: Tensor, time_BD: Tensor) -> Tensor:
        """[B, S, D] under the time embedding [B, D] (not its six-fold projection) -> [B, S, patch * C]."""
        shift_B1D, scale_B1D = (wide(self.modulation) + time_BD.unsqueeze(1)).chunk(2, dim=1)
        return self.head(self.norm_modulate(x_BSD, shift_B1D, scale_B1D))


class WanModel(nn.Module):
    """Predicts the velocity of noisy latents.

    config: sizes. adaln: one of `repro.adaln.IMPLS`; may be changed later through `use`.

    Built under `torch.device("meta")` it takes no memory; `to_empty` and `reset_parameters` then make it real, before
    or after it is sharded. All parameters are float32 as built; `.to(dtype)` and sharded mixed precision both work.
    Raises ValueError for an unknown adaln.
    """

    master_modules = ("time_embedding", "time_projection")
    """What a sharded engine leaves in fp32, as the official code's autocast does: small, and felt by every token."""

    def __init__(self, config: WanConfig, adaln: str = "fused") -> None:
        super().__init__()
        norm_modulate = get_impl(adaln)
        d = config.size.dim
        self.config = config
        self.patch_embedding = PatchEmbedding(d)
        self.text_embedding = Embedding(nn.Linear(TEXT_WIDTH, d), nn.GELU(approximate="tanh"), nn.Linear(d, d))
        self.time_embedding = Embedding(nn.Linear(TIME_FREQUENCIES, d), nn.SiLU(), nn.Linear(d, d))
        self.time_projection = Embedding(nn.SiLU(), nn.Linear(d, 6 * d))
        self.blocks = nn.ModuleList(Block(config.size, norm_modulate) for _ in range(config.size.layers))
        self.head = Head(d, norm_modulate)
        if self.head.modulation.device.type != "meta":
            self.reset_parameters()

    def use(self, adaln: str) -> None:
        """Switch every modulated norm to another implementation. Raises ValueError for an unknown one."""
        norm_modulate = get_impl(adaln)
        for module in self.modules():
            if isinstance(module, Block | Head):
                module.norm_modulate = norm_modulate

    def reset_parameters(self, seed: int = 0) -> None:
        """Wan's initial weights (`repro.wan.initialize`): a function of seed and device type, not of the sharding."""
        initialize(self, seed)

    def forward(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """Velocity of noisy latents.

        latents: [B, 16, T, H, W], H and W even. timesteps: [B], 1000 * sigma, from 0 to 1000. text: [B, L, 4096]
        embeddings (512 tokens, zero-padded, all attended to). Any floating dtypes. Returns latents' shape in the
        dtype that the model computes in. Raises ValueError where shapes do not fit each other or the model.
        """
        grid = self._check(latents, timesteps, text)
        x_BSD = self.patch_embedding(latents)
        time_BD = self.time_embedding(sinusoid(timesteps))
        time_B6D = wide(self.time_projection(time_BD)).unflatten(1, (6, -1))
        text_BLD = self.text_embedding(text)
        complex_dtype = torch.complex128 if x_BSD.dtype == torch.float64 else torch.complex64
        rope_S1K = rope_table(grid, self.config.head_dim, x_BSD.device, complex_dtype)
        x_BSD = x_BSD.clone()  # a linear's output is a view, which a compiler tells from what other blocks are given
        for block in self.blocks:
            x_BSD = block(x_BSD, time_B6D, text_BLD, rope_S1K)
        return unpatchify(self.head(x_BSD, time_BD), grid)

    def _check(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> tuple[int, int, int]:
        if latents.dim() != 5 or latents.shape[1] != LATENT_CHANNELS:
            raise ValueError(f"latents must have shape [B, {LATENT_CHANNELS}, T, H, W], got {list(latents.shape)}")
        batch, _, t, h, w = latents.shape
        if timesteps.shape != (batch,):
            raise ValueError(f"timesteps must have shape [{batch}], one a sample, got {list(timesteps.shape)}")
        if text.dim() != 3 or text.shape[0] != batch or text.shape[2] != TEXT_WIDTH:
            raise ValueError(f"text must have shape [{batch}, L, {TEXT_WIDTH}], got {list(text.shape)}")
        return self.config.grid((t, h, w))


def patchify(latents: Tensor) -> Tensor:
    """[B, C, T, H, W] -> [B, S, C * patch], tokens time-major, features in the order of a convolution's weight."""
    pt, ph, pw = PATCH
    b, c, t, h, w = latents.shape
    patches = latents.view(b, c, t // pt, pt, h // ph, ph, w // pw, pw)
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, -1, c * pt * ph * pw)


def unpatchify(patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """[B, S, patch * C] -> [B, C, T, H, W]. Channels come last in the head's features, unlike in `patchify`."""
    pt, ph, pw = PATCH
    t, h, w = grid
    x = patches.view(patches.shape[0], t, h, w, pt, ph, pw, LATENT_CHANNELS)
    return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(-1, LATENT_CHANNELS, t * pt, h * ph, w * pw)


def sinusoid(timesteps: Tensor) -> Tensor:
    """cos, then sin, of each timestep at 128 frequencies from 1 to 1e-4: [B] -> [B, 256], fp32 (float64 for float64).

    Formula of Diffusers' `get_timestep_embedding`, so that fp32 rounds as it does there.
    """
    t = wide(timesteps)
    half = TIME_FREQUENCIES // 2
    exponent = -math.log(1e4) * torch.arange(half, dtype=t.dtype, device=t.device) / half
    angle = t[:, None] * exponent.exp()
    return torch.cat((angle.cos(), angle.sin()), dim=-1)
