"""The `balanced` policy: full micro-batches in cost-matched slots, out of a bounded window over a random order.

Every micro-batch holds as many samples of one shape as memory allows, so that no time is lost to small batches and a
step has the reference's samples. What is left to choose is which micro-batches meet: steps take whole slots of groups
of buckets that cost alike (`repro.balance.groups`) from a window of drawn samples that is topped up at every step
(`repro.balance.window`). The division into groups is tried on the epoch's first steps, and the one with the best
share of perfect balance, less `mix_weight` times its mix distance, is kept.
Legend: K used buckets, dearest first; T steps; M slots; R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from repro.balance import groups, metrics, window
from repro.balance.packing import Buckets
from repro.balance.policies import Policy, check_cost
from repro.balance.schedule import ABSENT, IntArray, Layout, Schedule, check_whole, shuffled
from repro.balance.types import Cost
from repro.corpus.shapes import Corpus

Int32Array = npt.NDArray[np.int32]

CARRIED_SLOTS = 3.0
"""Slots' worth of micro-batches carried over by default, a step's at least: enough for the groups to fill slots."""

LONGEST_PERIOD = 16.0
"""Steps between two slots of a group beyond which the default bound on waiting does not grow."""

INCOMPLETE_SHARE = 0.01
"""Micro-batches, as a share, that the default bound on waiting may cut short: so far may samples a step be off."""

TRIAL_MICRO_BATCHES = 30_000
"""Micro-batches, over all ranks, on which a division into groups is tried, in 20 to 400 steps."""

LAST_STOPS = 8
"""Steps at an epoch's end, at most, that may be dealt anew together with what whole slots leave over."""


@dataclass(frozen=True)
class Balanced(Policy):
    """Equal work on all ranks wherever they meet, the corpus' mix in every step as far as that allows, nobody starved.

    m_mem: tokens of the largest micro-batch. cost: what micro-batches cost. mix_weight: throughput, as a share, that
    one unit of mix distance is worth. backlog_steps: micro-batches carried over from step to step, in steps; None for
    CARRIED_SLOTS, one step at least, and half a micro-batch of each bucket that is still filling. max_wait_steps:
    bound on the steps from a sample's being drawn to its being used; None for about twice what it takes on average
    until a group fills a slot, and until a bucket fills a micro-batch, the rarest buckets excepted.
    """

    name: ClassVar[str] = "balanced"
    m_mem: int
    cost: Cost
    mix_weight: float = 0.05
    backlog_steps: float | None = None
    max_wait_steps: int | None = None

    def __post_init__(self) -> None:
        check_whole(self, "m_mem")
        check_cost(self.cost)

    def batch_sizes(self, tokens: npt.ArrayLike) -> IntArray:
        return np.maximum(1, self.m_mem // np.asarray(tokens, dtype=np.int64))

    def schedule(self, corpus: Corpus, layout: Layout, seed: int = 0, epoch: int = 0) -> Schedule:
        sizes, _ = self.checked_sizes(corpus, layout)
        used = np.flatnonzero(corpus.counts)
        used = used[np.argsort(-self.cost.seconds(sizes[used], corpus.tokens[used]), kind="stable")]
        buckets = Buckets(corpus.tokens[used], sizes[used], self.cost)
        place = np.zeros(corpus.counts.size, dtype=np.int64)
        place[used] = np.arange(used.size)
        drawn, by_bucket = shuffled(corpus, seed, epoch)
        stream = window.Stream.of(place[corpus.bucket_of[drawn]], buckets.batch)

        rules, limit = self._rules(stream, buckets, layout)
        taken = window.take(stream, rules)
        place_of, batch = _with_tail(taken, corpus.samples, buckets, layout)
        bucket = np.where(place_of == ABSENT, ABSENT, used[place_of]).astype(np.int32)
        wait, backlog = _carried_over(corpus, bucket, batch, drawn, by_bucket, taken.drawn)
        return Schedule(corpus, bucket, batch, drawn[by_bucket], wait, limit, backlog)

    def _rules(self, stream: window.Stream, buckets: Buckets, layout: Layout) -> tuple[window.Rules, int]:
        """The best of the candidate divisions into groups, and the bound on waiting that goes with it."""
        size = layout.micro_batches * layout.ranks
        counts = np.bincount(stream.bucket, minlength=buckets.batch.size)
        full = counts / buckets.batch
        slots = full / full.sum() * layout.micro_batches
        incomplete = 0.5 * (1.0 - 1.0 / buckets.batch)  # micro-batches still filling, on average
        complete = max(1.0, CARRIED_SLOTS / layout.micro_batches)
        if self.backlog_steps is not None:
            complete = max(0.0, self.backlog_steps - float(incomplete.sum()) / size)
        reserve = complete * layout.ranks * slots + incomplete
        carried = float(reserve.sum()) / size
        # All that the window holds when a sample's patience ends is gone within this many steps.
        drain = ceil(1.0 + carried + buckets.batch.size / size) + 1
        rate = np.sort(slots) / slots.sum()
        filling = 1.0 / (size * float(rate[np.searchsorted(np.cumsum(rate), INCOMPLETE_SHARE)]))
        seconds = buckets.seconds(np.arange(full.size), buckets.batch)
        best: tuple[float, window.Rules] | None = None
        for starts in groups.candidates(seconds, buckets.batch, slots, layout.ranks, complete * layout.micro_batches):
            period = min(1.0 / float(np.add.reduceat(slots, starts).min()), LONGEST_PERIOD)
            patience = max(ceil(2.0 * (carried + max(period, filling))), drain + 1)
            if self.max_wait_steps is not None:
                patience = self.max_wait_steps - drain
                if patience <= drain:
                    raise ValueError(
                        f"max_wait_steps must be at least {2 * drain + 1} with {carried:g} steps carried over, "
                        f"got {self.max_wait_steps}"
                    )
            rules = window.Rules(starts, layout.micro_batches, layout.ranks, reserve, patience)
            taken = window.take(stream, rules, min(400, max(20, TRIAL_MICRO_BATCHES // size)))
            score = self._score(taken, buckets, layout, counts) if taken.drawn.size else 0.0
            if best is None or score > best[0]:
                best = score, rules
        assert best is not None, "there is at least one division into groups"
        return best[1], best[1].patience + drain

    def _score(self, taken: window.Taken, buckets: Buckets, layout: Layout, counts: IntArray) -> float:
        """Share of perfect balance less the weighted mix distance, over the steps taken."""
        bucket, batch = buckets.deal(taken.micro_batches, taken.samples, layout)
        total = float(metrics.slowest(buckets.seconds(bucket, batch), layout.sync).sum())
        each = buckets.seconds(np.arange(counts.size), buckets.batch) / buckets.batch
        share = float((taken.samples @ each).sum()) / (layout.ranks * total)
        return share - self.mix_weight * float(metrics.total_variation(taken.samples, counts).mean())


def _with_tail(taken: window.Taken, samples: int, buckets: Buckets, layout: Layout) -> tuple[IntArray, Int32Array]:
    """Bucket and batch [T, M, R] of the steps taken and of those for the rest, which may take over for the last few.

    Whole slots taken to the last leave a rest that does not match; where to stop is tried once all samples are drawn.
    """
    bucket, batch = buckets.deal(taken.micro_batches, taken.samples, layout)
    seconds = metrics.slowest(buckets.seconds(bucket, batch), layout.sync).sum(axis=1)
    steps = taken.drawn.size
    first = max(int(np.searchsorted(taken.drawn, samples)), steps - LAST_STOPS)
    best: tuple[float, int, tuple[IntArray, IntArray]] | None = None
    for stop in range(steps, first - 1, -1):
        rest = buckets.deal_rest(taken.left + taken.samples[stop:].sum(axis=0), layout)
        total = float(seconds[:stop].sum() + metrics.slowest(buckets.seconds(*rest), layout.sync).sum())
        if best is None or total < best[0] * (1 - 1e-9):
            best = total, stop, rest
    assert best is not None, "stopping after the last step is always tried"
    _, stop, rest = best
    return np.concatenate([bucket[:stop], rest[0]]), np.concatenate([batch[:stop], rest[1]]).astype(np.int32)


def _carried_over(
    corpus: Corpus, bucket: Int32Array, batch: Int32Array, drawn: IntArray, by_bucket: IntArray, before: IntArray
) -> tuple[int, float]:
    """Most steps from a sample's draw to its use, and most tokens drawn and unused after a step, in mean steps' tokens.

    drawn: int64 [N], sample ids as drawn; by_bucket their positions grouped by bucket; before: int64 [<= T], samples
    drawn before each step, all before the steps that it leaves out.
    """
    steps, buckets = bucket.shape[0], corpus.counts.size
    keys = np.arange(steps)[:, None, None] * buckets + np.maximum(bucket, 0)
    samples = np.bincount(keys.ravel(), weights=batch.ravel(), minlength=steps * buckets).reshape(steps, -1)
    samples = samples.astype(np.int64)
    before = np.append(before[:steps], np.full(max(0, steps - before.size), drawn.size))
    drawn_in = np.searchsorted(before, np.arange(drawn.size), side="right")[by_bucket]
    used_in = np.repeat(np.tile(np.arange(steps), buckets), samples.T.ravel())
    tokens = np.concatenate([[0], np.cumsum(corpus.tokens[corpus.bucket_of[drawn]])])
    waiting = tokens[before] - np.cumsum(samples @ corpus.tokens)
    return int((used_in - drawn_in).max()), float(waiting.max() / (tokens[-1] / steps))
