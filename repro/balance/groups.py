"""Cost groups: which buckets may share a slot, so that ranks that meet wait little and a step keeps the corpus' mix.

Buckets stand in order of the cost of a full micro-batch, dearest first, and are cut into contiguous groups. A step
takes whole slots of a group: cuts where the cost falls steeply keep dear micro-batches from holding up cheap ones; few
cuts keep rounding to whole slots from distorting the mix. In rounding, the buckets of a group give way in proportion to
1 / B, since a micro-batch of few samples hardly moves the mix.
Legend: K buckets, P positions of possible cuts, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MIX_WEIGHTS = (0.01, 0.03, 0.06, 0.1, 0.2, 0.5, 2.0)
"""Worth of mix distance against time lost, for which the best cuts are tried."""

STUCK_WEIGHTS = (0.0, 0.01, 0.03, 0.1)
"""The same for the part of the carried micro-batches that wait in incomplete slots: it may leave no choice of slots."""

MAX_CUTS = 40
"""Cuts are looked for at the steepest falls only; buckets (by aspect ratio, say) often cost nearly the same."""


@dataclass(frozen=True)
class _Intervals:
    """What each possible group of positions p to q (included) is expected to cost, all [P, P], used where p <= q.

    wait: time lost in its slots, share of all work. mix: total variation that rounding it to whole slots adds. stuck:
    slots' worth of its micro-batches that wait for a slot to fill.
    """

    wait: FloatArray
    mix: FloatArray
    stuck: FloatArray


def candidates(seconds: FloatArray, batch: IntArray, slots: FloatArray, ranks: int, carried: float) -> list[IntArray]:
    """Divisions into groups worth trying, each int64 [G], the first bucket of every group.

    seconds, batch [K]: cost and samples of a full micro-batch, dearest first. slots [K]: slots a step that each bucket
    fills on average. ranks: micro-batches in a slot. carried: slots' worth of micro-batches that may be carried over.
    """
    at = _positions(seconds)
    table = _intervals(seconds, batch, slots, ranks, at)
    found = {
        _best_cuts(table.wait + mix * table.mix + stuck / max(carried, 1.0) * table.stuck)
        for mix in MIX_WEIGHTS
        for stuck in STUCK_WEIGHTS
    }
    return [at[list(cuts)] for cuts in sorted(found)]


def _positions(seconds: FloatArray) -> IntArray:
    """First bucket of each of the at most MAX_CUTS + 1 runs between the steepest falls in cost."""
    fall = seconds[:-1] / seconds[1:] - 1.0
    steepest = np.argsort(-fall, kind="stable")[:MAX_CUTS]
    return np.concatenate([[0], np.sort(steepest) + 1]).astype(np.int64)


def _intervals(seconds: FloatArray, batch: IntArray, slots: FloatArray, ranks: int, at: IntArray) -> _Intervals:
    ends = np.append(at[1:], seconds.size)
    work, samples = float(seconds @ slots), float(batch @ slots)
    wait, mix, stuck = np.zeros((3, at.size, at.size))
    for p, first in enumerate(at):
        for q in range(p, at.size):
            part = slice(first, ends[q])
            lost, moved = _rounding(seconds[part], batch[part], slots[part])
            wait[p, q], mix[p, q] = lost / work, moved / samples
            # A queue that fills at a steady rate up to a slot and is emptied: 0, 1, .. R - 1 micro-batches are left.
            stuck[p, q] = max(0.0, 1.0 - float(slots[part].sum())) * (ranks - 1) / ranks / 2.0
    return _Intervals(wait, mix, stuck)


def _rounding(seconds: FloatArray, batch: IntArray, slots: FloatArray) -> tuple[float, float]:
    """Time lost (slot-seconds) and samples moved (slots' worth) a step where a group's slots are rounded up or down."""
    total = float(slots.sum())
    low = int(total)
    lost = moved = 0.0
    for whole, chance in ((low, low + 1 - total), (low + 1, total - low)):
        if chance < 1e-9:
            continue
        taken = slots * (whole / total)
        if low > 0:  # what is too much or too little now is next to nothing in the long run: least samples give way
            taken = _give_way(slots, batch, float(whole))
        lost += chance * _lost(seconds, taken, whole)
        moved += chance * 0.5 * float(batch @ np.abs(taken - slots))
    return lost, moved


def _give_way(slots: FloatArray, batch: IntArray, total: float) -> FloatArray:
    """The vector >= 0 of sum `total` nearest to `slots` in squares weighted by `batch`."""
    taken = slots.astype(np.float64)
    for _ in range(taken.size):
        free = (taken > 0) | (total > taken.sum())
        taken = np.where(free, taken + (total - taken.sum()) / (free / batch).sum() / batch, taken).clip(0.0)
        if abs(total - taken.sum()) < 1e-9:
            break
    return taken


def _lost(seconds: FloatArray, taken: FloatArray, whole: int) -> float:
    """Slot-seconds between the dearest and the mean of `whole` slots filled in order of cost."""
    edges = np.concatenate([[0.0], np.cumsum(taken)])
    lost = 0.0
    for slot in range(whole):
        inside = (np.minimum(edges[1:], slot + 1) - np.maximum(edges[:-1], slot)).clip(0.0)
        lost += float(seconds[inside > 1e-6].max(initial=0.0) - inside @ seconds)
    return lost


def _best_cuts(cost: FloatArray) -> tuple[int, ...]:
    """First positions of the groups whose costs [P, P] sum to the least, by dynamic programming over their ends."""
    size = cost.shape[0]
    best, back = np.zeros(size + 1), np.zeros(size + 1, dtype=np.int64)
    for end in range(1, size + 1):
        totals = best[:end] + cost[:end, end - 1]
        back[end] = int(np.flatnonzero(totals <= totals.min() + 1e-12)[-1])  # of equals, the smallest last group
        best[end] = totals[back[end]]
    cuts = []
    end = size
    while end:
        end = int(back[end])
        cuts.append(end)
    return tuple(reversed(cuts))
