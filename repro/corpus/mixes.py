"""Named corpora: mixes of clip shapes from published statistics, made to order in any size.

`named("wan-uniform", samples=100_000)` is a `Corpus` whose bucket counts match the mix as closely as whole samples
allow (largest remainder) and whose order is a seeded permutation. What a publication leaves open (frame rate, aspect
ratio, shares) is an assumption; each mix states its own next to the code that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from repro.corpus import published
from repro.corpus.buckets import BucketGrid
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.names import unknown

TOKEN_BUDGET = 48_000
"""Tokens of the equal-token baseline's micro-batch (AdaptiveLoad, arXiv 2605.17923: longest sequence it can train)."""

WAN_FPS = 16.0
"""Frame rate of Wan 2.1's training clips (arXiv 2503.20314)."""
WHOLE_CLIPS = BucketGrid(frames=tuple(range(1, 498, 16)), max_tokens=TOKEN_BUDGET, prefer="frames")
"""Buckets for published clip lengths: every second up to 31 s, within the budget so that every policy can run them."""


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


def _tokens(shape: Shape) -> int:
    return Tokenizer().tokens(shape)


def _square(frames: int, side: int) -> Shape:
    return Shape(frames, side, side)


def _wan_uniform() -> Mix:
    shapes = [Shape(f, 480, 832) for f in (1, 17, 33, 49, 65, 81)] + [Shape(f, 720, 1280) for f in (1, 17, 33, 49)]
    return Mix(
        name="wan-uniform",
        summary="Wan 2.1 480p and 720p, 1 to 81 frames; each bucket equally often under equal-token batches",
        source="shapes: Wan 2.1 (arXiv 2503.20314); token budget: AdaptiveLoad (arXiv 2605.17923)",
        assumptions="AdaptiveLoad does not publish its mix. Uniform over equal-token micro-batches of 48,000 tokens: "
        "its baseline meets every bucket equally often. 720p stops at 49 frames, the longest that fits the budget.",
        shapes=tuple(shapes),
        weights=tuple(max(1, TOKEN_BUDGET // _tokens(s)) for s in shapes),
    )


def _from_clips(clips: Sequence[tuple[float, int, int, float]], **about: str) -> Mix:
    """Mix of real clips, (frames at the training rate, height, width, weight) each, put into `WHOLE_CLIPS`."""
    frames, height, width, weight = (np.array(column) for column in zip(*clips, strict=True))
    bucket = WHOLE_CLIPS.assign(np.maximum(frames, 1).astype(np.int64), height, width).bucket
    total = np.bincount(bucket[bucket >= 0], weights=weight[bucket >= 0], minlength=len(WHOLE_CLIPS.shapes))
    used = sorted(np.flatnonzero(total).tolist(), key=lambda k: WHOLE_CLIPS.shapes[k])
    return Mix(shapes=tuple(WHOLE_CLIPS.shapes[k] for k in used), weights=tuple(float(total[k]) for k in used), **about)


_WHOLE_CLIPS_ASSUMPTION = (
    "Each clip takes the bucket with the most frames that it fills, then the largest of Wan 2.1's areas at which that "
    "is at most 48,000 tokens: a trainer that keeps clips whole and pays in resolution."
)


def _opensora_1_1() -> Mix:
    low, high = published.OPEN_SORA_1_1_FRAMES_RANGE
    counts = published.OPEN_SORA_1_1_FRAMES_COUNTS
    edges = np.linspace(low, high, len(counts) + 1)
    clips: list[tuple[float, int, int, float]] = []
    for start, stop, count in zip(edges[:-1], edges[1:], counts, strict=True):
        inside = np.arange(np.ceil(start), stop)  # whole frame counts in the bin share it equally
        clips += [(float(f), 720, 1280, count / inside.size) for f in inside]
    videos, images = published.OPEN_SORA_1_1_VIDEOS_TO_IMAGES
    clips.append((1.0, 720, 1280, sum(counts) * images / videos))
    return _from_clips(
        clips,
        name="opensora-1.1",
        summary="Open-Sora 1.1 pre-training: published clip lengths, 48 to 511 frames, and 21% images",
        source="Open-Sora 1.1 (hpcaitech/Open-Sora, docs/report_02.md)",
        assumptions="Frames are taken as they are, since Open-Sora 1.1 conditions on fps; 720p 16:9 sources, as in its "
        "largest source Panda-70M. " + _WHOLE_CLIPS_ASSUMPTION,
    )


def _opensora_1_2() -> Mix:
    clips = [
        (seconds * WAN_FPS, height, width, percent * share / 100 / 64)
        for start, stop, percent in published.OPEN_SORA_1_2_SECONDS
        for seconds in np.linspace(start, stop, 129)[1::2]  # midpoints of 64 equal parts: uniform within a class
        for height, width, share in published.OPEN_SORA_1_2_RESOLUTION
    ]
    return _from_clips(
        clips,
        name="opensora-1.2",
        summary="Open-Sora 1.2 stage 3: published length and resolution classes, 2 to 16 s",
        source="Open-Sora 1.2 (hpcaitech/Open-Sora, docs/report_03.md)",
        assumptions="Lengths are uniform within each published class and independent of resolution; 16:9; resampled to "
        "Wan 2.1's 16 fps. " + _WHOLE_CLIPS_ASSUMPTION,
    )


def _koala_36m() -> Mix:
    sigma = published.PROBED_CLIPS_SIGMA
    log_median = np.log(published.KOALA_36M_MEAN_SECONDS) - sigma**2 / 2  # mean of a log-normal: exp(mu + sigma^2 / 2)
    normal, parts = NormalDist(log_median, sigma), 2_000
    return _from_clips(
        [(float(np.exp(normal.inv_cdf((i + 0.5) / parts))) * WAN_FPS, 720, 1280, 1.0) for i in range(parts)],
        name="koala-36m",
        summary="Koala-36M: 720p, mean 17.2 s, log-normal lengths",
        source="Koala-36M (arXiv 2410.08260); spread of lengths from 212 sample clips of public video sets",
        assumptions="Only the mean is published, so lengths are log-normal with the spread of probed public clips; "
        "resampled to Wan 2.1's 16 fps; beyond 31 s trimmed. " + _WHOLE_CLIPS_ASSUMPTION,
    )


def _knapformer_32() -> Mix:
    # Wan's VAE takes 4k+1 frames, so KnapFormer's 4 become 5: two latent frames, the nearest that is still a video.
    rows = [(gpus * batch, _square(5 if f == 4 else f, side)) for gpus, batch, side, f in published.KNAPFORMER_32]
    return Mix(
        name="knapformer-32",
        summary="KnapFormer's simulated mix for 32 GPUs: images of 256 to 2048 px, clips of 5 and 85 frames",
        source="KnapFormer (arXiv 2508.06001)",
        assumptions="Shares are samples a step (GPUs x batch). Square pictures. Its 4-frame clips become 5 frames, "
        "which Wan's VAE takes.",
        shapes=tuple(s for _, s in rows),
        weights=tuple(float(w) for w, _ in rows),
    )


def _wan_curriculum() -> Mix:
    stages = (
        (_square(1, 256), Shape(81, 192, 336)),
        (Shape(1, 480, 832), Shape(81, 480, 832)),
        (Shape(1, 720, 1280), Shape(49, 720, 1280)),
    )
    weights = {s: 1.0 for stage in stages for s in stage}
    weights[stages[0][0]] += 2.0  # the image-only stage before the first joint one is as long as a joint stage
    return Mix(
        name="wan-curriculum",
        summary="Wan 2.1's curriculum in one epoch: 256 px images, then images and 5 s clips at 192, 480 and 720 px",
        source="Wan 2.1 (arXiv 2503.20314)",
        assumptions="Wan trains its four stages one after the other and publishes no shares: here each counts equally, "
        "and a joint stage is half images, half clips. 720p clips stop at 49 frames (5 s would be 75,600 tokens, "
        "beyond the 48,000 of AdaptiveLoad's budget).",
        shapes=tuple(weights),
        weights=tuple(weights.values()),
    )


def _images() -> Mix:
    return Mix(
        name="images",
        summary="Images of 256, 768 and 1024 px; each bucket equally often under Open-Sora 2.0's batch sizes",
        source="Open-Sora 2.0, stage 1 (hpcaitech/Open-Sora, docs/train.md)",
        assumptions="Shares are not published: proportional to the hand-tuned batch sizes, so that each bucket gives "
        "as many batches. Square pictures.",
        shapes=tuple(_square(1, side) for side, _ in published.OPEN_SORA_2_0_IMAGES),
        weights=tuple(float(batch) for _, batch in published.OPEN_SORA_2_0_IMAGES),
    )


def _worst_case() -> Mix:
    """Two buckets, as far apart as `wan-uniform` has them, in the proportion that hurts equal-token batches most.

    A step of R ranks waits for its slowest. If a share q of the micro-batches is long and costs k short ones, the
    ranks work (1 + q (k - 1)) / (1 + (1 - (1 - q)^R) (k - 1)) of the time. For the 14B model k is 2.6 at 48,000 tokens,
    and the minimum over q lies near 0.19 for 8 ranks and 0.13 for 16: one in six is within 2% of both.
    """
    short, long, micro_batches = Shape(1, 480, 832), Shape(49, 720, 1280), 6
    return Mix(
        name="worst-case",
        summary="Images and the longest clips only: one equal-token micro-batch in six is a single long clip",
        source="shapes and token budget as wan-uniform (arXiv 2503.20314, arXiv 2605.17923); the mix is ours",
        assumptions="AdaptiveLoad's worst sequence mix is not described. Taken as the two-bucket mix under which "
        "equal-token ranks wait the longest for the slowest of them, on 8 and 16 ranks.",
        shapes=(short, long),
        weights=((micro_batches - 1) * float(TOKEN_BUDGET // _tokens(short)), float(TOKEN_BUDGET // _tokens(long))),
    )


_BUILDERS: dict[str, Callable[[], Mix]] = {
    "wan-uniform": _wan_uniform,
    "opensora-1.1": _opensora_1_1,
    "opensora-1.2": _opensora_1_2,
    "koala-36m": _koala_36m,
    "knapformer-32": _knapformer_32,
    "wan-curriculum": _wan_curriculum,
    "images": _images,
    "worst-case": _worst_case,
}


def names() -> tuple[str, ...]:
    """Names of the corpora, in the order in which they are listed to users."""
    return tuple(_BUILDERS)


def summaries() -> dict[str, str]:
    """Name of each corpus to one line about it."""
    return {name: mix(name).summary for name in _BUILDERS}


@cache
def mix(name: str) -> Mix:
    """The mix called `name`. Raises KeyError, with the nearest names, for any other."""
    if name not in _BUILDERS:
        raise KeyError(unknown("corpus", name, _BUILDERS))
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
