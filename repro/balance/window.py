"""Steps of whole slots out of a bounded window of drawn samples: how many micro-batches of each bucket a step takes.

Samples are drawn in a random order into a window that is topped up before each step to what the step consumes plus
the carried backlog, measured in full micro-batches. A step then takes whole slots of the cost groups that are most
behind, and within a group the buckets that are most behind. Oldest samples of a bucket go first, and a sample that has
waited `patience` steps goes before everything else, matched or not.
Legend: K buckets, dearest first; G groups; M slots a step; R ranks; T steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """A corpus in the order in which it is drawn.

    bucket: int [N], bucket of each sample drawn. batch: int64 [K], samples of a full micro-batch. work: float64 [N],
    full micro-batches that the samples up to and including each one fill.
    """

    bucket: npt.NDArray[np.integer]
    batch: IntArray
    work: FloatArray

    @classmethod
    def of(cls, bucket: npt.NDArray[np.integer], batch: IntArray) -> Stream:
        """From the bucket of each sample [N] and the batch of each bucket [K]."""
        return cls(bucket, batch, np.cumsum((1.0 / batch)[bucket]))


@dataclass(frozen=True)
class Rules:
    """How the window is kept.

    starts: int64 [G], first bucket of each group. slots, ranks: M and R. reserve: float64 [K], full micro-batches of
    each bucket that stay in the window after a step, on average; their sum always does. patience: steps after which a
    waiting sample goes first.
    """

    starts: IntArray
    slots: int
    ranks: int
    reserve: FloatArray
    patience: int


@dataclass(frozen=True)
class Taken:
    """What the steps took, and what was left when no step of whole slots could be made any more.

    micro_batches, samples: int64 [T, K]. drawn: int64 [T], samples drawn before each step. left: int64 [K].
    """

    micro_batches: IntArray
    samples: IntArray
    drawn: IntArray
    left: IntArray


def take(stream: Stream, rules: Rules, steps: int | None = None) -> Taken:
    """Steps of M slots of R micro-batches until the stream is drawn and no full slots are left, or `steps` of them."""
    batch, starts = stream.batch, rules.starts
    total, size = stream.bucket.size, rules.slots * rules.ranks
    window = size + float(rules.reserve.sum())
    group = np.repeat(np.arange(starts.size), np.diff(np.append(starts, batch.size)))
    queue, gone, arrived = np.zeros_like(batch), np.zeros_like(batch), [np.zeros_like(batch)]
    used, position = 0.0, 0
    numbers: list[IntArray] = []
    samples: list[IntArray] = []
    drawn: list[int] = []
    while steps is None or len(numbers) < steps:
        # The margin keeps a sum of reciprocals that is whole but for rounding from drawing one sample more.
        target = min(total, int(np.searchsorted(stream.work, used + window - 1e-6)) + 1)
        if target > position:
            queue = queue + np.bincount(stream.bucket[position:target], minlength=batch.size)
            position = target
        arrived.append(queue + gone)
        due = queue / batch
        if position < total:
            due = due - rules.reserve
        forced = must_go(arrived, gone, batch, rules)
        number = step(queue, batch, due, forced, rules, group, draining=position == total)
        if number is None:
            break
        out = np.minimum(number * batch, queue)
        queue, gone = queue - out, gone + out
        used += float((out / batch).sum())
        numbers.append(number)
        samples.append(out)
        drawn.append(position)
    empty = np.zeros((0, batch.size), dtype=np.int64)
    return Taken(
        np.stack(numbers) if numbers else empty,
        np.stack(samples) if samples else empty,
        np.array(drawn, dtype=np.int64),
        queue,
    )


def step(
    queue: IntArray,
    batch: IntArray,
    due: FloatArray,
    forced: IntArray,
    rules: Rules,
    group: IntArray,
    draining: bool = False,
) -> IntArray | None:
    """Micro-batches int64 [K] that one step takes, M * R in all.

    queue: samples waiting. due: float64 [K], micro-batches by which each bucket is behind; sums to about M * R.
    forced: int64 [K], micro-batches that must go now, at most M * R in all. group: int64 [K], group of each bucket.
    Micro-batches are full but for those that are forced, or that complete a slot. draining: no more is drawn; return
    None where whole slots of full micro-batches have run out.
    """
    ranks, starts, size = rules.ranks, rules.starts, rules.slots * rules.ranks
    any_size = -(-queue // batch)
    if draining and int(any_size.sum()) < size:
        return None
    high = np.maximum(queue // batch, forced)
    in_group = np.add.reduceat(high, starts)
    slots = -(-np.add.reduceat(forced, starts) // ranks)
    if slots.sum() > rules.slots:
        return _filled_up(forced, size, any_size, int(np.flatnonzero(forced)[0]))
    behind = np.add.reduceat(due, starts) / ranks - slots
    score = np.where(in_group // ranks > slots, behind, -np.inf)
    for _ in range(rules.slots - int(slots.sum())):
        best = int(score.argmax())
        if score[best] == -np.inf:
            if draining:
                return None
            break
        slots[best] += 1
        behind[best] -= 1.0
        score[best] = behind[best] if in_group[best] // ranks > slots[best] else -np.inf
    wanted = np.minimum(slots * ranks, in_group)
    number = nearest(due, forced, high, wanted, batch, starts, group)
    short = slots * ranks - wanted
    lacking = int(short.argmax()) if short.any() else int(np.where(any_size > number, due - number, -np.inf).argmax())
    return _filled_up(number, size, any_size, int(starts[lacking]) if short.any() else lacking)


def nearest(
    due: FloatArray, low: IntArray, high: IntArray, wanted: IntArray, batch: IntArray, starts: IntArray, group: IntArray
) -> IntArray:
    """Whole numbers int64 [K] within low..high that sum to `wanted` [G] in each group, near `due`.

    Nearest in squares weighted by `batch`: what a group takes too much or too little falls on buckets of few samples a
    micro-batch. Rounded to whole numbers by largest remainder.
    """
    share = 1.0 / batch
    number = np.clip(due, low, high)
    for _ in range(batch.size):  # every pass but the last brings a bucket to its bound
        short = wanted - np.add.reduceat(number, starts)
        if np.abs(short).max() < 1e-6:
            break
        free = np.where(short[group] > 0, number < high, number > low)
        weight = np.add.reduceat(share * free, starts)
        number = np.clip(number + free * share * (short / np.maximum(weight, 1e-12))[group], low, high)
    whole = np.floor(number + 1e-6).astype(np.int64)
    short = wanted - np.add.reduceat(whole, starts)
    order = np.lexsort((whole - number, group))
    place = np.empty_like(order)
    place[order] = np.arange(order.size) - starts[group[order]]
    rounded: IntArray = whole + (place < short[group])
    return rounded


def must_go(arrived: list[IntArray], gone: IntArray, batch: IntArray, rules: Rules) -> IntArray:
    """Micro-batches int64 [K] for samples that have waited `patience` steps; of the oldest, M * R, if not all fit.

    arrived: samples [K] that had been drawn before the first step, the second, .. and the one to come, after a zero.
    gone: samples [K] used so far, the oldest of each bucket.
    """
    size = rules.slots * rules.ranks
    low = younger = np.zeros_like(gone)
    for then in range(len(arrived) - 1 - rules.patience, -1, -1):
        younger, low = low, -(-np.maximum(arrived[then] - gone, 0) // batch)
        if int(low.sum()) <= size:
            break
    if not younger.any():
        return low
    spare = size - int(low.sum())
    more = np.diff(np.minimum(np.cumsum(np.maximum(younger - low, 0)), spare), prepend=0)
    return low + more


def _filled_up(number: IntArray, size: int, high: IntArray, start: int) -> IntArray:
    """`number` and more micro-batches, partial ones if need be, up to `size`: from bucket `start` on, then dearer."""
    number = number.copy()
    missing = size - int(number.sum())
    for k in (*range(start, number.size), *range(start - 1, -1, -1)):
        if not missing:
            break
        more = min(missing, int(high[k] - number[k]))
        number[k] += more
        missing -= more
    return number
