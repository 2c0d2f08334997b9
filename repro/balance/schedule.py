"""An epoch's schedule: which shapes and how many samples go to every rank in every micro-batch of every step.

Shape legend: N samples and K buckets of the corpus, T steps, M slots (micro-batches a step and rank), R ranks. Slot j
of a step is its j-th micro-batch, on all ranks at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral

import numpy as np
import numpy.typing as npt

from repro.balance.types import MicroBatch, Protocols, Step, Sync, Weighting
from repro.corpus.shapes import Corpus

IntArray = npt.NDArray[np.int64]

ABSENT = -1


def check_whole(of: object, *names: str) -> None:
    """Raise ValueError for an attribute that is not a whole number from 1 on."""
    for name in names:
        value = getattr(of, name)
        if not isinstance(value, Integral) or value < 1:
            raise ValueError(f"{name} must be at least 1 and whole, got {value!r}")


@dataclass(frozen=True)
class Layout:
    """How a training run is laid out, and how policies are compared on it.

    ranks: R. m_mem: tokens of the largest micro-batch that fits in memory. micro_batches: a step and rank, of the
    reference (`equal_token` with m_mem tokens a micro-batch). sync: where ranks meet, once a `step` or in every
    `micro_batch`. protocol: `as_published`, one micro-batch a step and rank, whatever samples a step that gives; or
    `matched`, every policy gets as many micro-batches a step as it needs for the reference's expected samples a step.

    Raises ValueError for a value that no run can have.
    """

    ranks: int
    m_mem: int
    micro_batches: int = 1
    sync: Sync = "micro_batch"
    protocol: Protocols = "matched"

    def __post_init__(self) -> None:
        check_whole(self, "ranks", "m_mem", "micro_batches")
        if self.sync not in ("step", "micro_batch"):
            raise ValueError(f"sync must be 'step' or 'micro_batch', got {self.sync!r}")
        if self.protocol not in ("as_published", "matched"):
            raise ValueError(f"protocol must be 'as_published' or 'matched', got {self.protocol!r}")
        if self.protocol == "as_published" and self.micro_batches != 1:
            raise ValueError(f"as_published means one micro-batch a step and rank, got {self.micro_batches}")


def largest_batches(corpus: Corpus, m_mem: int) -> IntArray:
    """floor(m_mem / S) for each bucket, int64 [K]; 1 in buckets without samples.

    Raises ValueError for an empty corpus, and where one sample alone exceeds m_mem, naming it.
    """
    counts = corpus.counts
    if corpus.samples == 0:
        raise ValueError(f"corpus {corpus.name} has no samples")
    over = (counts > 0) & (corpus.tokens > m_mem)
    if over.any():
        first = int(np.flatnonzero(over[corpus.bucket_of])[0])
        k = int(corpus.bucket_of[first])
        raise ValueError(
            f"sample {first} ({corpus.shapes[k]}, {corpus.tokens[k]} tokens) exceeds the memory limit of {m_mem} "
            f"tokens a micro-batch, as do {int(counts[over].sum()) - 1} others: drop or crop them, or raise the limit "
            "(m_mem, --m-mem)"
        )
    return np.where(counts > 0, m_mem // corpus.tokens, 1)


@dataclass(frozen=True, eq=False)
class Schedule:
    """One epoch in array form; samples are dealt lazily, each bucket's in the order of `order`.

    bucket: int32 [T, M, R], bucket of each micro-batch; -1 on every rank where a step has fewer than M slots.
    batch: int32 [T, M, R], its samples; 0 with a bucket >= 0 is a filler (one sample of that bucket at weight 0).
    order: int64 [N], sample ids by bucket, within a bucket as they are dealt in (step, slot, rank) order.
    max_wait_steps: most steps that a sample waited between being drawn and being used; 0 without carry-over.
    wait_limit_steps: the bound on that which the policy enforces.
    backlog_steps: most tokens drawn and unused after a step, in mean steps' tokens; 0 without carry-over.

    Raises ValueError unless each sample is dealt exactly once, every rank has the same slots and the bound is kept.
    """

    corpus: Corpus
    bucket: npt.NDArray[np.int32]
    batch: npt.NDArray[np.int32]
    order: IntArray
    max_wait_steps: int = 0
    wait_limit_steps: int = 0
    backlog_steps: float = 0.0

    def __post_init__(self) -> None:
        if self.bucket.ndim != 3 or self.bucket.shape != self.batch.shape:
            raise ValueError(f"bucket and batch must both be [T, M, R], got {self.bucket.shape} and {self.batch.shape}")
        if self.max_wait_steps > self.wait_limit_steps:
            raise ValueError(f"a sample waits {self.max_wait_steps} steps, the limit is {self.wait_limit_steps}")
        absent = self.bucket == ABSENT
        if np.any(absent.any(axis=2) != absent.all(axis=2)):
            raise ValueError("a slot is absent on some ranks only: every rank must have the same micro-batches")
        if np.any(self.batch[absent] != 0):
            raise ValueError("an absent slot has samples")
        dealt = np.bincount(self.bucket[~absent], weights=self.batch[~absent], minlength=self.buckets)
        wrong = np.flatnonzero(dealt != self.corpus.counts)
        if wrong.size:
            k = int(wrong[0])
            raise ValueError(f"bucket {k} has {self.corpus.counts[k]} samples, the schedule deals {int(dealt[k])}")

    @property
    def steps(self) -> int:
        """Optimizer steps T of the epoch."""
        return int(self.bucket.shape[0])

    @property
    def ranks(self) -> int:
        """Ranks R."""
        return int(self.bucket.shape[2])

    @property
    def buckets(self) -> int:
        """Buckets K of the corpus."""
        return int(self.corpus.tokens.size)

    @cached_property
    def slots_of_step(self) -> IntArray:
        """int64 [T], micro-batches of every rank in each step."""
        return (self.bucket[:, :, 0] != ABSENT).sum(axis=1).astype(np.int64)

    @cached_property
    def samples_of_step(self) -> IntArray:
        """int64 [T], samples over all ranks in each step; fillers count as none."""
        return self.batch.sum(axis=(1, 2), dtype=np.int64)

    @property
    def fillers(self) -> int:
        """Weight-0 micro-batches, over all ranks."""
        return int(np.count_nonzero((self.batch == 0) & (self.bucket != ABSENT)))

    @cached_property
    def start(self) -> IntArray:
        """int64 [T, M, R], position in `order` of each micro-batch's first sample (a filler: its bucket's)."""
        offset = np.concatenate([[0], np.cumsum(self.corpus.counts)])
        bucket, batch = self.bucket.ravel(), self.batch.ravel().astype(np.int64)
        by_bucket = np.argsort(bucket, kind="stable")
        before = np.cumsum(batch[by_bucket]) - batch[by_bucket]
        start = np.empty(bucket.size, dtype=np.int64)
        start[by_bucket] = before  # absent slots sort first and hold no samples, so `before` counts from bucket 0
        filler = (batch == 0) & (bucket != ABSENT)
        start[filler] = offset[bucket[filler]]
        return start.reshape(self.bucket.shape)

    def micro_batches(self, step: int, rank: int, weighting: Weighting = "sample") -> tuple[MicroBatch, ...]:
        """What `rank` computes in `step`, in order.

        weighting: `sample` gives each sample 1 / n_step; `batch_mean` averages micro-batch means, as a loop does that
        averages gradients of mean losses over ranks and micro-batches. Either way a step's weights sum to 1.
        Raises IndexError for a step or rank outside the schedule, ValueError for an unknown weighting.
        """
        if not 0 <= step < self.steps or not 0 <= rank < self.ranks:
            raise IndexError(f"step {step}, rank {rank} is outside {self.steps} steps on {self.ranks} ranks")
        if weighting not in ("sample", "batch_mean"):
            raise ValueError(f"weighting must be 'sample' or 'batch_mean', got {weighting!r}")
        real = int(np.count_nonzero(self.batch[step]))
        out = []
        for slot in range(int(self.slots_of_step[step])):
            k, b, first = (int(a[step, slot, rank]) for a in (self.bucket, self.batch, self.start))
            ids = self.order[first : first + max(b, 1)].tolist()
            weight = 0.0
            if b:
                weight = 1.0 / int(self.samples_of_step[step]) if weighting == "sample" else 1.0 / (real * b)
            out.append(MicroBatch(self.corpus.shapes[k], tuple(ids), (weight,) * len(ids)))
        return tuple(out)

    def step(self, step: int, weighting: Weighting = "sample") -> Step:
        """One optimizer step of all ranks. Raises as `micro_batches`."""
        return Step(tuple(self.micro_batches(step, rank, weighting) for rank in range(self.ranks)))

    def __iter__(self) -> Iterator[Step]:
        """Steps in order, samples weighted 1 / n_step."""
        return (self.step(t) for t in range(self.steps))


def shuffled(corpus: Corpus, seed: int, epoch: int) -> tuple[IntArray, IntArray]:
    """The epoch's random order of all samples, and the positions in it grouped by bucket (stable), both int64 [N]."""
    drawn = np.random.default_rng([seed, epoch]).permutation(corpus.samples)
    bucket = corpus.bucket_of[drawn]
    if len(corpus.shapes) <= np.iinfo(np.int16).max:
        bucket = bucket.astype(np.int16)  # NumPy sorts 16-bit keys by radix: linear in N
    return drawn, np.argsort(bucket, kind="stable")


def fold(
    bucket: npt.NDArray[np.int32], batch: npt.NDArray[np.int32], slots_a_step: float
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Fold slots [J, R] into steps [T, M, R] of `slots_a_step` slots on average.

    Where that is not a whole number, steps alternate between the two nearest (error diffusion), at least one each.
    """
    slots = bucket.shape[0]
    per_step = max(1.0, slots_a_step)
    steps = int(np.ceil(slots / per_step)) + 1
    edges = np.floor(np.arange(steps + 1) * per_step + 1e-9).astype(np.int64)
    edges = np.minimum(edges, slots)
    edges = edges[: int(np.searchsorted(edges, slots)) + 1]
    widths = np.diff(edges)
    shape = (widths.size, int(widths.max(initial=1)), bucket.shape[1])
    out_bucket, out_batch = np.full(shape, ABSENT, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    step = np.repeat(np.arange(widths.size), widths)
    slot = np.arange(slots) - np.repeat(edges[:-1], widths)
    out_bucket[step, slot], out_batch[step, slot] = bucket, batch
    return out_bucket, out_batch
