"""Drawn figures as pictures inside a page: lossless, each once, and together no larger than a budget."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, features

from repro.report.draw import Drawn

BUDGET = 4_000_000
"""Characters that all pictures of a page may take; what does not fit is named instead of shown."""
DOTS_PER_INCH = 96
"""What CSS takes an inch for."""


@dataclass(frozen=True)
class Picture:
    """A figure to show. uri: the picture itself, empty where it did not fit. width, height: CSS pixels.

    device: slug that the figure's name ends with, empty where it shows all devices.
    """

    name: str
    caption: str
    claims: tuple[str, ...]
    device: str
    uri: str
    width: int
    height: int

    @property
    def title(self) -> str:
        """The name without the device, as words."""
        return self.name.removesuffix(f"-{self.device}").replace("_", " ").replace("-", " ")


def embed(
    figures: Sequence[Drawn], folder: Path, devices: Collection[str], first: Collection[str], budget: int = BUDGET
) -> list[Picture]:
    """Pictures of the figures that were saved to folder/<name>.png, in the order of `figures`.

    devices: slugs of all devices. first: those whose figures are shown even where others then do not fit.
    """
    of = {f.name: _device(f.name, devices) for f in figures}
    uris: dict[str, str] = {}
    left = budget
    for figure in sorted(figures, key=lambda f: bool(of[f.name]) and of[f.name] not in first):
        uri = _uri(folder / f"{figure.name}.png")
        uris[figure.name] = uri if len(uri) <= left else ""
        left -= len(uris[figure.name])
    pictures = []
    for f in figures:
        width, height = _size(folder / f"{f.name}.png")
        pictures.append(Picture(f.name, f.caption, f.claims, of[f.name], uris[f.name], width, height))
    return pictures


def _device(name: str, devices: Collection[str]) -> str:
    return max((d for d in devices if name.endswith(f"-{d}")), key=len, default="")


def _uri(path: Path) -> str:
    """The picture as a data: URI, in WebP where Pillow can: the same pixels in a third of PNG's bytes or fewer."""
    if not features.check("webp"):
        return _data("image/png", path.read_bytes())
    buffer = io.BytesIO()
    with Image.open(path) as picture:
        picture.convert("RGB").save(buffer, "WEBP", lossless=True, method=4)
    return _data("image/webp", buffer.getvalue())


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _size(path: Path) -> tuple[int, int]:
    """Width and height in CSS pixels of a picture that states its resolution."""
    with Image.open(path) as picture:
        x, y = picture.info.get("dpi", (DOTS_PER_INCH, DOTS_PER_INCH))
        return round(picture.width * DOTS_PER_INCH / float(x)), round(picture.height * DOTS_PER_INCH / float(y))
