"""Batch size policies: how many samples of each bucket go together, and which rank gets which micro-batch.

Each policy is a small frozen class with a `name`, `batch_sizes(tokens)` and `schedule(corpus, layout, seed, epoch)`.
All but `balanced` (see `repro.balance.balanced`) make their micro-batches first and deal them afterwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from repro.balance import assign
from repro.balance.schedule import ABSENT, IntArray, Layout, Schedule, check_whole, fold, largest_batches, shuffled
from repro.balance.types import Cost
from repro.corpus.shapes import Corpus
from repro.names import unknown

NAMES = (
    "equal_token",
    "equal_token_same_bucket",
    "dual_constraint",
    "dual_constraint_same_bucket",
    "quadratic_budget",
    "equal_time",
    "longest_first",
    "balanced",
)


def check_cost(cost: Cost) -> None:
    """Raise TypeError for what cannot tell `seconds`."""
    if not callable(getattr(cost, "seconds", None)):
        raise TypeError(
            f"cost must tell seconds(batch, tokens), as that of repro.balance.fit.measured_cost does, got {cost!r}"
        )


def _check_positive(of: object, *names: str) -> None:
    """Raise ValueError for an attribute that is not positive and finite."""
    for name in names:
        if not 0 < getattr(of, name) < np.inf:  # also catches NaN
            raise ValueError(f"{name} must be positive and finite, got {getattr(of, name)}")


class Policy(ABC):
    """A rule for batch sizes and for who gets what; `name` is its slug in rows."""

    name: ClassVar[str]

    @abstractmethod
    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        """Samples of a full micro-batch for buckets of `tokens` [K] tokens a sample: int64 [K], at least 1."""

    @abstractmethod
    def schedule(self, corpus: Corpus, layout: Layout, seed: int = 0, epoch: int = 0) -> Schedule:
        """One epoch for all ranks, the same wherever it is computed: seed and epoch decide.

        Raises ValueError for an empty corpus, a sample larger than layout.m_mem or a batch that exceeds it.
        """

    def checked_sizes(self, corpus: Corpus, layout: Layout) -> tuple[IntArray, IntArray]:
        """Own and the reference's batch sizes, int64 [K]; 1 in buckets without samples. Raises as `schedule`."""
        reference = largest_batches(corpus, layout.m_mem)
        used = corpus.counts > 0
        sizes = np.ones_like(reference)
        sizes[used] = self.batch_sizes(corpus.tokens[used])
        over = np.flatnonzero(used & (sizes > reference))
        if over.size:
            k = int(over[0])
            raise ValueError(
                f"{self.name} puts {sizes[k]} samples of {corpus.shapes[k]} into a micro-batch, "
                f"{sizes[k] * corpus.tokens[k]} tokens, more than the memory limit of {layout.m_mem}: lower its budget"
            )
        return sizes, reference


@dataclass(frozen=True)
class _ReadyMade(Policy):
    """Policies that cut every bucket into micro-batches (its last one partial), shuffle these and deal them.

    same_bucket: all ranks of a slot draw the same bucket; what a bucket has left after its last full slot is dealt at
    the epoch's tail, by length.
    """

    same_bucket: ClassVar[bool] = False

    def schedule(self, corpus: Corpus, layout: Layout, seed: int = 0, epoch: int = 0) -> Schedule:
        sizes, reference = self.checked_sizes(corpus, layout)
        full, rest = np.divmod(corpus.counts, sizes)
        number = full + (rest > 0)
        bucket = np.repeat(np.arange(number.size, dtype=np.int32), number)
        batch = sizes[bucket].astype(np.int32)
        last = np.cumsum(number)[rest > 0] - 1
        batch[last] = rest[rest > 0]

        rng = np.random.default_rng([seed, epoch, 1])
        slots = self._slots(bucket, batch, corpus, layout.ranks, rng)
        a_step = 1.0
        if layout.protocol == "matched":
            wanted = -(-corpus.counts // reference)  # micro-batches of the reference, rounded up
            a_step = layout.micro_batches * int(number.sum()) / int(wanted.sum())
        bucket_TMR, batch_TMR = fold(*slots, a_step)
        bucket_TMR, batch_TMR = self._assign(bucket_TMR, batch_TMR, corpus, layout)
        drawn, by_bucket = shuffled(corpus, seed, epoch)
        return Schedule(corpus, bucket_TMR, batch_TMR, drawn[by_bucket])

    def _slots(
        self,
        bucket: npt.NDArray[np.int32],
        batch: npt.NDArray[np.int32],
        corpus: Corpus,
        ranks: int,
        rng: np.random.Generator,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Micro-batches, sorted by bucket, to slots [J, R], fillers last."""
        if self.same_bucket:
            number = np.bincount(bucket, minlength=corpus.tokens.size)
            place = np.arange(bucket.size) - np.repeat(np.cumsum(number) - number, number)
            whole = place < np.repeat(number // ranks * ranks, number)
            groups = rng.permutation(np.flatnonzero(whole).reshape(-1, ranks)).ravel()
            tail = np.flatnonzero(~whole)
            tail = tail[np.argsort(-corpus.tokens[bucket[tail]], kind="stable")]
            drawn = np.concatenate([groups, tail])
        else:
            drawn = rng.permutation(bucket.size)
        slots = -(-bucket.size // ranks)
        fillers = slots * ranks - bucket.size
        used = np.unique(bucket)
        shortest = used[np.argmin(corpus.tokens[used])]
        out_bucket = np.concatenate([bucket[drawn], np.full(fillers, shortest, dtype=np.int32)])
        out_batch = np.concatenate([batch[drawn], np.zeros(fillers, dtype=np.int32)])
        return out_bucket.reshape(slots, ranks), out_batch.reshape(slots, ranks)

    def _assign(
        self,
        bucket: npt.NDArray[np.int32],
        batch: npt.NDArray[np.int32],
        corpus: Corpus,
        layout: Layout,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Rearrange micro-batches [T, M, R] within their steps; here they stay as drawn."""
        return bucket, batch


@dataclass(frozen=True)
class EqualToken(_ReadyMade):
    """B = max(1, floor(token_budget / S)): equal tokens a micro-batch, each rank drawing its own bucket."""

    name: ClassVar[str] = "equal_token"
    token_budget: int

    def __post_init__(self) -> None:
        check_whole(self, "token_budget")

    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        return np.maximum(1, self.token_budget // np.asarray(tokens, dtype=np.int64))


@dataclass(frozen=True)
class EqualTokenSameBucket(EqualToken):
    """`equal_token` with one bucket for all ranks of a slot."""

    name: ClassVar[str] = "equal_token_same_bucket"
    same_bucket: ClassVar[bool] = True


@dataclass(frozen=True)
class DualConstraint(_ReadyMade):
    """B = max(1, min(floor(m_mem / S), floor(m_comp / S^p))): the rule of AdaptiveLoad (arXiv 2605.17923).

    m_mem: tokens. m_comp: in tokens^p. p: exponent of the fitted step time a + b * B * S^p.
    """

    name: ClassVar[str] = "dual_constraint"
    m_mem: int
    m_comp: float
    p: float

    def __post_init__(self) -> None:
        check_whole(self, "m_mem")
        _check_positive(self, "m_comp", "p")

    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        tokens = np.asarray(tokens, dtype=np.int64)
        # A relative 1e-9 keeps floor(m_comp / S^p) at n where m_comp was computed as n * S^p in floating point.
        compute = np.floor(self.m_comp / tokens.astype(np.float64) ** self.p * (1 + 1e-9))
        return np.maximum(1, np.minimum(self.m_mem // tokens, compute)).astype(np.int64)


@dataclass(frozen=True)
class DualConstraintSameBucket(DualConstraint):
    """`dual_constraint` with one bucket for all ranks of a slot."""

    name: ClassVar[str] = "dual_constraint_same_bucket"
    same_bucket: ClassVar[bool] = True


@dataclass(frozen=True)
class QuadraticBudget(_ReadyMade):
    """B = max(1, floor(budget / (S + S^2 / quadratic))): lhotse's DynamicBucketingSampler with `quadratic_duration`.

    budget: effective tokens a micro-batch (lhotse's max_duration). quadratic: length in tokens at which the quadratic
    term has grown to the linear one. All ranks draw the same bucket, as lhotse does with `sync_buckets`.
    """

    name: ClassVar[str] = "quadratic_budget"
    same_bucket: ClassVar[bool] = True
    budget: int
    quadratic: float

    def __post_init__(self) -> None:
        check_whole(self, "budget")
        if not self.quadratic > 0:  # also catches NaN; infinite where time is linear in tokens
            raise ValueError(f"quadratic must be positive, got {self.quadratic}")

    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        tokens = np.asarray(tokens, dtype=np.float64)
        return np.maximum(1, np.floor(self.budget / (tokens + tokens**2 / self.quadratic))).astype(np.int64)


@dataclass(frozen=True)
class EqualTime(_ReadyMade):
    """The largest B within the memory limit whose micro-batch takes at most `target` seconds: Open-Sora's search.

    target: None for the time of one sample of the longest bucket, the least that no micro-batch has to exceed.
    """

    name: ClassVar[str] = "equal_time"
    m_mem: int
    cost: Cost
    target: float | None = None

    def __post_init__(self) -> None:
        check_whole(self, "m_mem")
        check_cost(self.cost)
        if self.target is not None:
            _check_positive(self, "target")

    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        tokens = np.asarray(tokens, dtype=np.int64)
        target = self.target if self.target is not None else float(self.cost.seconds(1, tokens.max()))
        low, high = np.ones_like(tokens), np.maximum(1, self.m_mem // tokens)
        while np.any(low < high):  # bisection; a micro-batch's time grows with its samples
            middle = (low + high + 1) // 2
            fits = self.cost.seconds(middle, tokens) <= target * (1 + 1e-9)
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low


@dataclass(frozen=True)
class LongestFirst(_ReadyMade):
    """Ready-made batches of m_mem tokens in random order; within a step the dearest go to the least loaded rank."""

    name: ClassVar[str] = "longest_first"
    m_mem: int
    cost: Cost

    def __post_init__(self) -> None:
        check_whole(self, "m_mem")
        check_cost(self.cost)

    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        return np.maximum(1, self.m_mem // np.asarray(tokens, dtype=np.int64))

    def _assign(
        self,
        bucket: npt.NDArray[np.int32],
        batch: npt.NDArray[np.int32],
        corpus: Corpus,
        layout: Layout,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        bucket, batch = bucket.copy(), batch.copy()
        present = bucket != ABSENT
        seconds = np.zeros(bucket.shape)
        seconds[present] = self.cost.seconds(np.maximum(batch[present], 1), corpus.tokens[bucket[present]])
        slots_of_step = present[:, :, 0].sum(axis=1)
        for slots in np.unique(slots_of_step):
            steps = np.flatnonzero(slots_of_step == slots)
            flat = seconds[steps, :slots].reshape(steps.size, -1)
            index = assign.longest_first(flat, layout.ranks, layout.sync).reshape(steps.size, -1)
            for array in (bucket, batch):
                dealt = np.take_along_axis(array[steps, :slots].reshape(steps.size, -1), index, axis=1)
                array[steps, :slots] = dealt.reshape(steps.size, slots, layout.ranks)
        return bucket, batch


def make(
    name: str,
    *,
    m_mem: int,
    cost: Cost,
    token_budget: int | None = None,
    m_comp: float | None = None,
    p: float | None = None,
    quadratic: float | None = None,
) -> Policy:
    """The policy called `name`, with what it needs of these.

    token_budget: of `equal_token`; None for m_mem. m_comp, p: of `dual_constraint`. quadratic: of `quadratic_budget`,
    whose budget is m_mem, the largest with which no bucket exceeds the memory limit: b / c of a fitted
    a + b * B * S + c * B * S^2.

    Raises KeyError, with the nearest names, for an unknown one; ValueError where a policy lacks a value that it needs
    or one is out of range; TypeError for a cost that is none.
    """
    budget = m_mem if token_budget is None else token_budget
    match name:
        case "equal_token":
            return EqualToken(budget)
        case "equal_token_same_bucket":
            return EqualTokenSameBucket(budget)
        case "dual_constraint" | "dual_constraint_same_bucket":
            if m_comp is None or p is None:
                raise ValueError(f"{name} needs m_comp and p (repro.balance.limits.choose), got m_comp={m_comp}, p={p}")
            rule = DualConstraint if name == "dual_constraint" else DualConstraintSameBucket
            return rule(m_mem, m_comp, p)
        case "quadratic_budget":
            if quadratic is None:
                raise ValueError("quadratic_budget needs quadratic, the length at which its two terms are equal")
            return QuadraticBudget(m_mem, quadratic)
        case "equal_time":
            return EqualTime(m_mem, cost)
        case "longest_first":
            return LongestFirst(m_mem, cost)
        case "balanced":
            from repro.balance.balanced import Balanced  # builds on this module

            return Balanced(m_mem, cost)
    raise KeyError(unknown("policy", name, NAMES))
