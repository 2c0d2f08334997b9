"""What passes between policies, sampler, simulator and trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from repro.corpus.shapes import Shape

Sync = Literal["step", "micro_batch"]
Protocols = Literal["as_published", "matched"]
Weighting = Literal["sample", "batch_mean"]


class Cost(Protocol):
    """Time of a micro-batch, forward and backward, on one rank without communication."""

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds of micro-batches of `batch` samples of `tokens` tokens each (broadcast together)."""
        ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one shape that go through the model together on one rank.

    sample_ids: B ids. weights: B weights of the samples' losses in the step's mean; 1 / n_step under
    `weighting="sample"`, 0 for a filler at an epoch's tail (fillers count as no samples).
    """

    shape: Shape
    sample_ids: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step: for each rank a tuple of micro-batches, the same number on every rank.

    The loss on a rank is R * sum(w_i * l_i) over its samples, where the engine averages gradients over R ranks.
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]
