"""Clip shapes and their sequence lengths.

Shape legend: F frames, H height and W width in pixels, S tokens per sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, order=True, slots=True)
class Shape:
    """Pixel shape of a clip: frames (4k+1 for Wan; 1 is an image), height, width."""

    frames: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}"


@dataclass(frozen=True)
class Tokenizer:
    """Strides of a video VAE followed by a patch embedding, each (time, height, width).

    Defaults are Wan 2.1's: VAE stride (4, 8, 8), patch (1, 2, 2)
    (Wan-Video/Wan2.1, wan/configs/shared_config.py and wan_t2v_*.py).
    """

    vae_stride: tuple[int, int, int] = (4, 8, 8)
    patch: tuple[int, int, int] = (1, 2, 2)

    def latent(self, shape: Shape) -> tuple[int, int, int]:
        """Latent (T, H, W): the causal VAE keeps the first frame, so T = (F - 1) / stride + 1.

        Raises ValueError where the shape does not divide by strides and patch.
        """
        st, sh, sw = self.vae_stride
        pt, ph, pw = self.patch
        if shape.frames < 1 or (shape.frames - 1) % st or ((shape.frames - 1) // st + 1) % pt:
            raise ValueError(f"frames of {shape} must be {st}k+1 (with k+1 divisible by {pt}), got {shape.frames}")
        if shape.height < 1 or shape.width < 1 or shape.height % (sh * ph) or shape.width % (sw * pw):
            raise ValueError(f"height and width of {shape} must be multiples of {sh * ph} and {sw * pw}")
        return (shape.frames - 1) // st + 1, shape.height // sh, shape.width // sw

    def tokens(self, shape: Shape) -> int:
        """Sequence length S of one sample: ((F-1)/4 + 1) * (H/16) * (W/16) for Wan. Raises as `latent`."""
        t, h, w = self.latent(shape)
        return (t // self.patch[0]) * (h // self.patch[1]) * (w // self.patch[2])


@dataclass(frozen=True)
class Corpus:
    """A data set as training sees it: buckets, and the bucket of every sample.

    name: slug used in rows. source: where its statistics come from.
    shapes: the K buckets. tokens: int64 [K], S of each. bucket_of: int32 [N], bucket of sample id 0..N-1.
    Raises ValueError for tokens that are not positive whole numbers, or a bucket that is none.
    """

    name: str
    source: str
    shapes: tuple[Shape, ...]
    tokens: npt.NDArray[np.int64]
    bucket_of: npt.NDArray[np.int32]

    def __post_init__(self) -> None:
        k = len(self.shapes)
        if self.tokens.shape != (k,) or self.tokens.dtype.kind not in "iu" or (self.tokens < 1).any():
            raise ValueError(f"tokens of {self.name} must be {k} whole numbers of at least 1, got {self.tokens[:8]}")
        if self.bucket_of.size and not 0 <= self.bucket_of.min() <= self.bucket_of.max() < k:
            raise ValueError(
                f"bucket of every sample of {self.name} must be in 0..{k - 1}, got {self.bucket_of.min()} to "
                f"{self.bucket_of.max()}"
            )

    @property
    def samples(self) -> int:
        """Number of samples N."""
        return int(self.bucket_of.size)

    @cached_property
    def counts(self) -> npt.NDArray[np.int64]:
        """int64 [K], samples in each bucket; read-only, since it is counted once."""
        counts = np.bincount(self.bucket_of, minlength=len(self.shapes)).astype(np.int64)
        counts.flags.writeable = False
        return counts
