"""Which rank takes which micro-batch of a step, every rank the same number of them.

Legend: T steps, M slots (micro-batches a step and rank), R ranks.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from repro.balance.types import Sync

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def aligned(cost: FloatArray, ranks: int) -> IntArray:
    """Sort each step's micro-batches by cost and deal them in runs of R, so that those of a slot cost alike.

    cost: [T, M * R] seconds. Returns int64 [T, M, R], indices into each step's M * R micro-batches, dearest slot first.
    Within a slot the dearest goes to the rank with the least so far, so that sums are close as well. Where ranks meet
    in every micro-batch, no other dealing of the same micro-batches has a smaller sum of slot maxima.
    """
    return _deal(cost, np.argsort(-cost, axis=1, kind="stable").reshape(cost.shape[0], cost.shape[1] // ranks, ranks))


def longest_first(cost: FloatArray, ranks: int, sync: Sync) -> IntArray:
    """Deal each step's micro-batches, dearest first, to the least loaded rank that has room for one more.

    cost: [T, M * R] seconds. Returns int64 [T, M, R] as `aligned`. Graham's longest-processing-time rule with equal
    numbers on all ranks. Where ranks meet in every micro-batch a sum means nothing and the slots are dealt in runs.
    """
    if sync == "micro_batch":
        return aligned(cost, ranks)
    steps, items = cost.shape
    slots = items // ranks
    out = np.empty((steps, slots, ranks), dtype=np.int64)
    for step in range(steps):
        seconds = cost[step].tolist()
        heap = [(0.0, rank, 0) for rank in range(ranks)]
        where = np.empty(items, dtype=np.int64)
        for item in np.argsort(-cost[step], kind="stable").tolist():
            load, rank, taken = heap[0]
            where[item] = taken * ranks + rank
            if taken + 1 < slots:
                heapq.heapreplace(heap, (load + seconds[item], rank, taken + 1))
            else:
                heapq.heappop(heap)
        out[step].ravel()[where] = np.arange(items)
    return out


def _deal(cost: FloatArray, runs: IntArray) -> IntArray:
    """Within each run of R micro-batches give the dearest to the least loaded rank; runs [T, M, R], dearest first."""
    steps, slots, ranks = runs.shape
    out = np.empty_like(runs)
    load = np.zeros((steps, ranks))
    for slot in range(slots):
        least = np.argsort(load, axis=1, kind="stable")
        run = runs[:, slot]
        np.put_along_axis(out[:, slot], least, run, axis=1)
        load += np.take_along_axis(cost, out[:, slot], axis=1)
    return out
