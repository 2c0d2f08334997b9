"""Named corpora: mixes of clip shapes from published statistics, made to order in any size.

`named("wan-uniform", samples=100_000)` is a `Corpus` whose bucket counts match the mix as closely as whole samples
allow (largest remainder) and whose order is a seeded permutation. What a publication leaves open (frame rate, aspect
ratio, shares) is an assumption; each mix states its own next to the code that uses it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.corpus.shapes import Corpus, Shape, Tokenizer

TOKEN_BUDGET = 48_000
"""Tokens of the equal-token baseline's micro-batch (AdaptiveLoad, arXiv 2605.17923: longest sequence it can train)."""


@dataclass(frozen=True)
class Mix:
    """Shares of samples over clip shapes.

    name: slug. summary: one line. source: publication that the numbers come from. assumptions: what it leaves open
    and what is assumed here, with the reason. shapes: the K buckets. weights: K shares, any positive scale.
    """

    name: str
    summary: str
    source: str
    assumptions: str
    shapes: tuple[Shape, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.weights) or not self.shapes:
            raise ValueError(f"mix {self.name}: {len(self.shapes)} shapes but {len(self.weights)} weights")
        if len(set(self.shapes)) != len(self.shapes):
            raise ValueError(f"mix {self.name}: every shape must appear once")
        if not all(w > 0 for w in self.weights):
            raise ValueError(f"mix {self.name}: weights must be positive, got {self.weights}")


def apportion(weights: npt.ArrayLike, total: int) -> npt.NDArray[np.int64]:
    """Whole counts, int64 [K], that sum to `total` and follow `weights` [K] (largest remainder, ties to the first)."""
    share = np.asarray(weights, dtype=np.float64)
    quota = share / share.sum() * total
    counts = np.floor(quota).astype(np.int64)
    by_remainder = np.argsort(counts - quota, kind="stable")
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return counts


def _wan_uniform() -> Mix:
    shapes = [Shape(f, 480, 832) for f in (1, 17, 33, 49, 65, 81)] + [Shape(f, 720, 1280) for f in (1, 17, 33, 49)]
    per_micro_batch = [max(1, TOKEN_BUDGET // Tokenizer().tokens(s)) for s in shapes]
    return Mix(
        name="wan-uniform",
        summary="Wan 2.1 480p and 720p, 1 to 81 frames; every bucket equally often under equal-token batches",
        source="shapes: Wan 2.1 (arXiv 2503.20314); token budget: AdaptiveLoad (arXiv 2605.17923)",
        assumptions="The paper does not publish its mix. Uniform over equal-token micro-batches of 48,000 tokens, since "
        "that is how often its baseline would meet each bucket; 720p stops at 49 frames, the longest that fits the budget.",
        shapes=tuple(shapes),
        weights=tuple(per_micro_batch),
    )


_BUILDERS: dict[str, Callable[[], Mix]] = {"wan-uniform": _wan_uniform}


def names() -> tuple[str, ...]:
    """Names of the corpora, in the order in which they are listed to users."""
    return tuple(_BUILDERS)


def mix(name: str) -> Mix:
    """The mix called `name`. Raises KeyError, with the nearest names, for any other."""
    if name not in _BUILDERS:
        near = difflib.get_close_matches(name, _BUILDERS, n=3, cutoff=0.4) or list(_BUILDERS)
        raise KeyError(f"no corpus named {name!r}; did you mean {', '.join(near)}?")
    return _BUILDERS[name]()


def named(name: str, samples: int = 10_000, seed: int = 0, tokenizer: Tokenizer | None = None) -> Corpus:
    """Corpus `name` with `samples` clips: the same for the same arguments, on every machine.

    Raises KeyError for an unknown name, ValueError for fewer than one sample.
    """
    if samples < 1:
        raise ValueError(f"a corpus needs at least one sample, got samples={samples}")
    chosen, tok = mix(name), tokenizer or Tokenizer()
    counts = apportion(chosen.weights, samples)
    in_order = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return Corpus(
        name=name,
        source=chosen.source,
        shapes=chosen.shapes,
        tokens=np.array([tok.tokens(s) for s in chosen.shapes], dtype=np.int64),
        bucket_of=np.random.default_rng(seed).permutation(in_order),
    )
