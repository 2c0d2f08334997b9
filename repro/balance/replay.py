"""A schedule's steps from solo times, to hold against the steps as they were taken.

A solo time is that of a micro-batch which all ranks take at once, so that nobody waits for anybody; it includes what
ranks exchange. A step then takes what the slowest rank takes wherever they meet (`repro.balance.metrics.slowest`), and
what an update takes after its last micro-batch. Legend: T steps, M slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.balance import metrics
from repro.balance.schedule import ABSENT, Layout, Schedule, largest_batches
from repro.balance.types import Cost, Sync

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SoloTimes:
    """Times of measured micro-batches, and of no others. times: (batch, tokens of a sample) -> seconds."""

    times: Mapping[tuple[int, int], float]

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> FloatArray:
        """Seconds of micro-batches (broadcast together). Raises KeyError for one that was not measured."""
        b, s = np.broadcast_arrays(np.asarray(batch, np.int64), np.asarray(tokens, np.int64))
        flat = [self.times[int(i), int(j)] for i, j in zip(b.ravel(), s.ravel(), strict=True)]
        return np.array(flat, np.float64).reshape(b.shape)


@dataclass(frozen=True)
class Errors:
    """How far predicted steps [T] are from measured ones.

    each: mean over steps of |predicted / measured - 1|, %. total: sum of predicted over sum of measured - 1, %.
    """

    each: float
    total: float

    @classmethod
    def of(cls, predicted: npt.ArrayLike, measured: npt.ArrayLike) -> Errors:
        """Errors of predicted against measured seconds, both [T]."""
        p, m = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
        return cls(100 * float(np.abs(p / m - 1).mean()), 100 * float(p.sum() / m.sum() - 1))


def micro_batches(schedule: Schedule, m_mem: int) -> list[tuple[int, int]]:
    """(bucket, batch) whose solo times `predict` and `work_seconds` need; a filler runs one sample."""
    there = schedule.bucket != ABSENT
    used = set(zip(schedule.bucket[there].tolist(), np.maximum(schedule.batch[there], 1).tolist(), strict=True))
    full = largest_batches(schedule.corpus, m_mem)
    return sorted(used | {(int(k), int(full[k])) for k in np.flatnonzero(schedule.corpus.counts)})


def predict(schedule: Schedule, solo: Cost, update: float, sync: Sync) -> FloatArray:
    """float64 [T], seconds of each step; `update` of them beside its passes. solo: `SoloTimes`, or a cost from them."""
    passes: FloatArray = metrics.slowest(metrics.compute_seconds(schedule, solo), sync).sum(axis=1)
    return passes + update


def work_seconds(schedule: Schedule, layout: Layout, solo: SoloTimes, update: float) -> FloatArray:
    """float64 [T], what each step's samples take in full micro-batches with equal work on every rank, and an update.

    The time that a step really takes is longer by what is lost to imbalance and to smaller micro-batches. Steps hold
    very different work; the time lost to a second of work differs far less.
    """
    corpus, steps = schedule.corpus, schedule.steps
    used = np.flatnonzero(corpus.counts)
    full = largest_batches(corpus, layout.m_mem)[used]
    a_sample = np.zeros(schedule.buckets)
    a_sample[used] = solo.seconds(full, corpus.tokens[used]) / full
    seconds = schedule.batch * a_sample[schedule.bucket]
    total: FloatArray = seconds.reshape(steps, -1).sum(axis=1) / layout.ranks + update
    return total
