"""Procedural clips that a model can learn: discs and squares that drift over a shaded ground. NumPy alone.

Where the packages behind `repro.wan.pictures` are missing, they stand in for its clips.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from repro.wan.pictures import Clip

NAMES = ("disc", "square")
FASTEST = 1.5
"""Pixels a frame."""
SOFT = 1.5
"""Pixels over which edges fade: as little detail as pictures have, for which the latents' scales are made."""


@dataclass(frozen=True)
class MovingShapes:
    """Two or three bright shapes, each with a size, a position and a velocity; they leave at one edge and come back."""

    def longest(self) -> int:
        """No bound of its own."""
        return 1 << 30

    def cut(self, size: tuple[int, int, int], rng: np.random.Generator) -> tuple[Clip, str]:
        """A clip [F, h, w] in -1 .. 1 and its caption."""
        count, height, width = size
        y, x = np.mgrid[:height, :width]
        slope = rng.uniform(-0.5, 0.5, 2)
        ground = -0.5 + slope[0] * (y / height - 0.5) + slope[1] * (x / width - 0.5)
        clip = np.repeat(ground[None], count, axis=0)
        words = []
        for _ in range(int(rng.integers(2, 4))):
            name, radius = NAMES[int(rng.integers(2))], rng.uniform(0.12, 0.22) * min(height, width)
            start, velocity = rng.uniform(0, 1, 2) * (height, width), rng.uniform(-FASTEST, FASTEST, 2)
            bright = rng.uniform(0.2, 1.0)
            for f in range(count):
                dy, dx = (
                    np.abs((at - start[i] - f * velocity[i] + n / 2) % n - n / 2)
                    for i, (at, n) in enumerate(((y, height), (x, width)))
                )
                distance = np.maximum(dy, dx) if name == "square" else np.hypot(dy, dx)
                cover = 1 / (1 + np.exp((distance - radius) / SOFT))
                clip[f] += cover * (bright - clip[f])
            words.append(name)
        return clip.astype(np.float32), "moving " + " ".join(words)
