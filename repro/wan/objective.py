"""Flow matching: what the model is asked to predict, and at which noise level.

Noise and level of a sample are functions of seed, epoch and sample id (`repro.wan.draws`). Whatever batch, rank or
policy a sample lands in, it poses the same question, so policies are comparable sample by sample.

Legend: B samples, sigma the share of noise, x0 clean latents, eps noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from repro.wan import draws
from repro.wan.block import wide

Draw = Literal["uniform", "logit_normal"]

TIMESTEPS = 1000.0
"""The model is told 1000 * sigma."""


@dataclass(frozen=True)
class Question:
    """What a micro-batch of samples is trained on.

    noisy: (1 - sigma) x0 + sigma eps. target: eps - x0. Both like the latents, fp32 (float64 for float64).
    timesteps: fp32 or float64 [B], 1000 * sigma.
    """

    noisy: Tensor
    target: Tensor
    timesteps: Tensor


@dataclass(frozen=True)
class FlowMatching:
    """Rectified flow with a straight path from latents to noise (Lipman et al. 2023; Esser et al. 2024).

    draw: distribution of sigma before the shift: `uniform`, or `logit_normal`, the logistic function of a normal of
    mean `mean` and deviation `std` (Esser et al. 2024, section 3.1). shift: sigma -> shift sigma / (1 + (shift - 1)
    sigma), which moves training towards noise as resolution asks (same paper, section 5.3.2); Wan 2.1 samples with 5,
    and with 3 at 480p. seed: of all draws.

    Raises ValueError for an unknown draw, a shift or std that is not positive.
    """

    draw: Draw = "logit_normal"
    shift: float = 3.0
    mean: float = 0.0
    std: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.draw not in get_args(Draw):
            raise ValueError(f"draw must be one of {', '.join(get_args(Draw))}, got {self.draw!r}")
        for name in ("shift", "std"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")

    def sigma(self, sample_ids: Sequence[int], epoch: int = 0, device: torch.device | str = "cpu") -> Tensor:
        """float64 [B], the share of noise of each sample in this epoch, inside (0, 1)."""
        key = draws.keys(sample_ids, "sigma", self.seed, epoch)
        if self.draw == "uniform":
            sigma = draws.uniform(key, 1)[:, 0]
        else:
            sigma = torch.sigmoid(self.mean + self.std * draws.normal(key, (1,))[:, 0].double())
        return (self.shift * sigma / (1 + (self.shift - 1) * sigma)).to(device)

    def noise(
        self, sample_ids: Sequence[int], shape: Sequence[int], epoch: int = 0, device: torch.device | str = "cpu"
    ) -> Tensor:
        """fp32 [B, *shape], the noise of each sample in this epoch."""
        return draws.normal(draws.keys(sample_ids, "noise", self.seed, epoch, device=device), shape)

    def ask(self, latents: Tensor, sample_ids: Sequence[int], epoch: int = 0) -> Question:
        """Noisy latents, target and timesteps of clean latents [B, C, T, H, W] of any floating dtype.

        Raises ValueError unless there is one sample id for each.
        """
        if len(sample_ids) != latents.shape[0]:
            raise ValueError(
                f"sample_ids must name each of the {latents.shape[0]} samples, got {len(sample_ids)}: {sample_ids}"
            )
        x0 = wide(latents)
        eps = self.noise(sample_ids, latents.shape[1:], epoch, latents.device).to(x0.dtype)
        sigma = self.sigma(sample_ids, epoch, latents.device).to(x0.dtype)
        per_sample = sigma.view(-1, *[1] * (latents.dim() - 1))
        return Question((1 - per_sample) * x0 + per_sample * eps, eps - x0, TIMESTEPS * sigma)

    def losses(
        self,
        model: Callable[[Tensor, Tensor, Tensor], Tensor],
        latents: Tensor,
        text: Tensor,
        sample_ids: Sequence[int],
        epoch: int = 0,
    ) -> Tensor:
        """[B], the loss of each sample under `model(noisy, timesteps, text)`, to be weighted by the caller."""
        question = self.ask(latents, sample_ids, epoch)
        return squared_errors(model(question.noisy, question.timesteps, text), question.target)


def squared_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """[B], mean squared error of each sample over all its elements, in fp32 (float64 for a float64 prediction)."""
    return (wide(prediction) - target).square().flatten(1).mean(1)
