"""What a Wan 2.1 text-to-video model is made of: widths and depth, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from repro.balance.models import MODELS, PATCH, ModelSize
from repro.names import unknown


@dataclass(frozen=True)
class WanConfig:
    """Sizes of a `WanModel`; what they do not name is the same in every Wan 2.1 text-to-video model.

    size: widths, heads and number of blocks (`repro.balance.models`).

    Raises ValueError where the head width is too small for rotary embedding of three axes.
    """

    size: ModelSize

    def __post_init__(self) -> None:
        if self.head_dim < 6:
            raise ValueError(
                f"heads of {self.size.name} must be at least 6 wide for time, height and width to get rotary features, "
                f"got {self.head_dim}"
            )

    @classmethod
    def preset(cls, name: str, layers: int | None = None) -> WanConfig:
        """`tiny`, `wan-1.3b` or `wan-14b`, at another depth where `layers` is given.

        Raises ValueError for an unknown name or layers below 1.
        """
        if name not in MODELS:
            raise ValueError(unknown("model", name, MODELS))
        size = MODELS[name]
        return cls(size if layers is None else replace(size, layers=layers))

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.size.dim // self.size.heads

    def grid(self, latent: tuple[int, int, int]) -> tuple[int, int, int]:
        """Tokens along (time, height, width) of a latent (T, H, W).

        Raises ValueError where the patch does not divide the latent.
        """
        if any(n < 1 or n % p for n, p in zip(latent, PATCH, strict=True)):
            raise ValueError(f"latent (T, H, W) must be multiples of the patch {PATCH}, got {latent}")
        t, h, w = (n // p for n, p in zip(latent, PATCH, strict=True))
        return t, h, w
