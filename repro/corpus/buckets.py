"""Bucket grids, and which bucket a real clip goes to.

A bucket is one `Shape` that clips are resized, centre-cropped and trimmed to, so that they can share a micro-batch.
Legend: n clips, K buckets, A areas, R aspect ratios (height / width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntFlag
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt

from repro.corpus.shapes import Shape, Tokenizer

WAN_FRAMES = (1, 17, 33, 49, 65, 81)
"""Images, and 1 to 5 s at 16 fps in steps of 16 frames (Wan 2.1, arXiv 2503.20314, trains up to 81 frames)."""
WAN_AREAS = (256 * 256, 480 * 832, 720 * 1280)
"""Pixel budgets of Wan 2.1's curriculum: 256 px images and 192 px clips, then 480p, then 720p (arXiv 2503.20314)."""
ASPECTS = (9 / 16, 3 / 4, 1.0, 4 / 3, 16 / 9)
"""Height / width of the common film, photograph and portrait formats."""


class Fate(IntFlag):
    """What happens to a clip on the way into its bucket; a dropped clip has exactly one of the dropping bits."""

    KEPT = 0
    TRIMMED = 1
    """Frames beyond the bucket's are cut off."""
    CROPPED = 2
    """More than 0.1% of the picture is cut off after resizing."""
    TOO_SHORT = 4
    """A clip with fewer frames than the shortest video bucket."""
    TOO_SMALL = 8
    """Would have to be enlarged by more than `max_upscale` even for the smallest area."""
    TOO_ELONGATED = 16
    """More than `max_crop` of the picture would be cut off."""
    TOO_MANY_TOKENS = 32
    """No bucket that this clip fills has at most `max_tokens` tokens."""

    @property
    def dropped(self) -> bool:
        """Whether the clip is left out of training."""
        return self >= Fate.TOO_SHORT


REASONS: dict[Fate, str] = {
    Fate.TRIMMED: "trimmed to the bucket's frames",
    Fate.CROPPED: "cropped to the bucket's aspect ratio",
    Fate.TOO_SHORT: "fewer frames than the shortest video bucket",
    Fate.TOO_SMALL: "smaller than the smallest bucket",
    Fate.TOO_ELONGATED: "aspect ratio too far from every bucket's",
    Fate.TOO_MANY_TOKENS: "no bucket for it within the token limit",
}
"""What a report calls each fate."""


@dataclass(frozen=True)
class Assignment:
    """Buckets of n clips.

    bucket: int32 [n], index into `BucketGrid.shapes`, -1 where dropped. fate: uint8 [n], bits of `Fate`.
    crop: float32 [n], share of the resized picture that is cut off (0 where dropped).
    """

    bucket: npt.NDArray[np.int32]
    fate: npt.NDArray[np.uint8]
    crop: npt.NDArray[np.float32]


@dataclass(frozen=True)
class BucketGrid:
    """Every combination of frames, area and aspect ratio whose sequence is at most `max_tokens` long.

    frames: increasing, each what the tokenizer's VAE takes (4k+1 for Wan). areas: increasing pixel budgets, never
    exceeded. aspects: height / width, increasing. prefer: what a clip that fits several buckets keeps, its resolution
    ("area": the largest area, then the most frames) or its length ("frames"). max_upscale: how far a clip may be
    enlarged; the default forgives a few rows cut off by an encoder. max_crop: largest share of the picture to cut
    off; the default lets 2.39:1 film through into 16:9. short_clips: whether a clip shorter than every video bucket
    is dropped or becomes an image.
    Raises ValueError for a grid without buckets or with values that the tokenizer cannot take.
    """

    frames: tuple[int, ...] = WAN_FRAMES
    areas: tuple[int, ...] = WAN_AREAS
    aspects: tuple[float, ...] = ASPECTS
    max_tokens: int | None = None
    prefer: Literal["area", "frames"] = "area"
    max_upscale: float = 1.05
    max_crop: float = 0.3
    short_clips: Literal["drop", "image"] = "drop"
    tokenizer: Tokenizer = field(default_factory=Tokenizer)

    def __post_init__(self) -> None:
        for name in ("frames", "areas", "aspects"):
            values = getattr(self, name)
            if not values or values[0] <= 0 or any(a >= b for a, b in pairwise(values)):
                raise ValueError(f"{name} must be positive and increasing, got {values}")
        if self.max_upscale < 1 or not 0 <= self.max_crop < 1:
            raise ValueError(f"want max_upscale >= 1 and 0 <= max_crop < 1, got {self.max_upscale} and {self.max_crop}")
        if not self.shapes:
            raise ValueError(f"no bucket has at most {self.max_tokens} tokens; raise max_tokens or add a smaller area")
        if len(self.shapes) > np.iinfo(np.int16).max:  # what a manifest stores for each sample
            raise ValueError(f"{len(self.shapes)} buckets are too many; use fewer frames, areas or aspects")

    def size(self, area: int, aspect: float) -> tuple[int, int]:
        """Height and width: multiples of VAE stride x patch, height / width near `aspect`, height * width <= area.

        The shorter side is rounded to the nearest multiple, the longer one follows: 480 * 832 at 9:16 is 480 x 832.
        Raises ValueError where the area is below one patch.
        """
        unit_h, unit_w = (s * p for s, p in zip(self.tokenizer.vae_stride[1:], self.tokenizer.patch[1:], strict=True))
        if aspect > 1:
            short, long, ratio = unit_w, unit_h, 1 / aspect
        else:
            short, long, ratio = unit_h, unit_w, aspect
        a = max(1, round(math.sqrt(area * ratio) / short))
        b = min(round(a * short / ratio / long), area // (a * short * long))
        if b < 1:
            raise ValueError(f"area {area} is too small for an aspect ratio of {aspect:.3g}")
        return (b * long, a * short) if aspect > 1 else (a * short, b * long)

    @cached_property
    def _sizes_AR2(self) -> npt.NDArray[np.int64]:
        return np.array([[self.size(a, r) for r in self.aspects] for a in self.areas], dtype=np.int64)

    def _allowed(self, frames: int, height: int, width: int) -> bool:
        tokens = self.tokenizer.tokens(Shape(frames, height, width))
        return self.max_tokens is None or tokens <= self.max_tokens

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """The K buckets, by area, aspect ratio and frames."""
        sizes = [(int(h), int(w)) for h, w in self._sizes_AR2.reshape(-1, 2)]
        found = (Shape(f, h, w) for h, w in sizes for f in self.frames if self._allowed(f, h, w))
        return tuple(dict.fromkeys(found))

    @cached_property
    def _index_ARF(self) -> npt.NDArray[np.int32]:
        """Bucket of (area, aspect, frames), -1 where it would be too long."""
        position = {s: i for i, s in enumerate(self.shapes)}
        return np.array(
            [
                [[position.get(Shape(f, int(h), int(w)), -1) for f in self.frames] for h, w in row]
                for row in self._sizes_AR2
            ],
            dtype=np.int32,
        )

    def assign(self, frames: npt.ArrayLike, height: npt.ArrayLike, width: npt.ArrayLike) -> Assignment:
        """Buckets of n clips at the training frame rate; vectorised, about 0.3 s for a million clips.

        frames, height, width: positive whole numbers [n]; one frame is an image, and stays one.
        A clip takes the nearest aspect ratio, is resized to cover the bucket, centre-cropped, and trimmed at its end.
        """
        f, h, w = (np.asarray(v) for v in (frames, height, width))
        n_areas, n = len(self.areas), f.size
        log_aspects = np.log(self.aspects)
        aspect = np.searchsorted((log_aspects[1:] + log_aspects[:-1]) / 2, np.log(h / w)).astype(np.intp)
        video = f > 1
        # Index of the longest bucket that the clip fills; a video never becomes a one-frame bucket unless asked.
        fills = np.searchsorted(self.frames, f, side="right") - 1
        shortest = np.where(video & (self.short_clips == "drop") & (self.frames[0] == 1), 1, 0)
        # Longest bucket within the token limit, by area and aspect: tokens grow with frames.
        longest_AR = (self._index_ARF >= 0).sum(axis=2) - 1

        best = np.full(n, -1, dtype=np.int32)
        best_frames = np.full(n, -1, dtype=np.intp)
        best_area = np.zeros(n, dtype=np.intp)
        fits_size = np.zeros(n, dtype=bool)
        for a in range(n_areas):  # few areas, many clips
            scale = np.maximum(self._sizes_AR2[a, aspect, 0] / h, self._sizes_AR2[a, aspect, 1] / w)
            at = np.minimum(fills, longest_AR[a, aspect])
            large_enough = scale <= self.max_upscale
            take = large_enough & (at >= shortest)
            if self.prefer == "frames":
                take &= at >= best_frames
            best = np.where(take, self._index_ARF[a, aspect, at], best)
            best_frames = np.where(take, at, best_frames)
            best_area = np.where(take, a, best_area)
            fits_size |= large_enough

        size = self._sizes_AR2[best_area, aspect]
        scale = np.maximum(size[:, 0] / h, size[:, 1] / w)
        crop = 1 - size[:, 0] * size[:, 1] / (scale * scale * h * w)
        fate = np.select(
            [fills < shortest, ~fits_size, best < 0, crop > self.max_crop],
            [Fate.TOO_SHORT, Fate.TOO_SMALL, Fate.TOO_MANY_TOKENS, Fate.TOO_ELONGATED],
            Fate.KEPT,
        ).astype(np.uint8)
        kept = fate == Fate.KEPT
        trimmed = kept & (np.asarray(self.frames)[best_frames] < f)
        fate[trimmed] |= np.uint8(Fate.TRIMMED)
        fate[kept & (crop > 1e-3)] |= np.uint8(Fate.CROPPED)
        return Assignment(
            bucket=np.where(kept, best, -1).astype(np.int32),
            fate=fate,
            crop=np.where(kept, crop, 0).astype(np.float32),
        )
