"""What a schedule costs and how evenly: the three imbalances, the mix, and the distance from perfect balance.

Three imbalances, told apart: across buckets (`bucket_cv`), across ranks that wait for each other (`rank_cv`, `bubble`)
and across steps (`step_cv`). The last alone misleads: it falls when every step waits for the slowest bucket.
Legend: N samples, K buckets, T steps, M slots (micro-batches a step and rank), R ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from repro.balance.schedule import ABSENT, Schedule, largest_batches
from repro.balance.types import Cost, Sync
from repro.corpus.shapes import Corpus

FloatArray = npt.NDArray[np.float64]

UNITS: dict[str, str] = {
    "samples_per_s": "1/s",
    "tokens_per_s": "1/s",
    "samples_per_step": "samples",
    "share_of_perfect": "fraction",
    "mix_distance": "fraction",
    "bucket_cv": "fraction",
    "rank_cv": "fraction",
    "step_cv": "fraction",
    "bubble": "fraction",
    "max_wait_steps": "steps",
    "backlog_steps": "steps",
    "memory_use": "fraction",
    "pinned_share": "fraction",
}
"""The metrics of a simulated epoch, and their units in rows."""


def compute_seconds(schedule: Schedule, cost: Cost) -> FloatArray:
    """float64 [T, M, R], seconds of each micro-batch; 0 in absent slots; a filler costs what one sample costs."""
    absent = schedule.bucket == ABSENT
    # Far fewer distinct micro-batches than micro-batches: cost each once.
    width = int(schedule.batch.max(initial=1)) + 1
    keys = np.where(absent, 0, schedule.bucket * np.int64(width) + np.maximum(schedule.batch, 1))
    present = np.flatnonzero(np.bincount(keys.ravel(), minlength=schedule.buckets * width))
    present = present[present > 0]  # key 0, bucket 0 with batch 0, stands for absent
    table = np.zeros(schedule.buckets * width)
    table[present] = cost.seconds(present % width, schedule.corpus.tokens[present // width])
    seconds: FloatArray = table[keys]
    return seconds


def perfect_seconds(corpus: Corpus, m_mem: int, cost: Cost) -> float:
    """Rank-seconds of the corpus in full micro-batches of floor(m_mem / S) samples, nobody waiting for anybody."""
    used = np.flatnonzero(corpus.counts)
    batch = largest_batches(corpus, m_mem)[used]
    return float((corpus.counts[used] / batch * cost.seconds(batch, corpus.tokens[used])).sum())


def mix_distance(schedule: Schedule) -> FloatArray:
    """float64 [T], total variation between the buckets of a step's samples and the corpus: 0 same mix, 1 disjoint."""
    keys = np.arange(schedule.steps)[:, None, None] * schedule.buckets + np.maximum(schedule.bucket, 0)
    samples = np.bincount(keys.ravel(), weights=schedule.batch.ravel(), minlength=schedule.steps * schedule.buckets)
    return total_variation(samples.reshape(schedule.steps, -1), schedule.corpus.counts)


def total_variation(samples: npt.NDArray[np.number], counts: npt.NDArray[np.integer]) -> FloatArray:
    """float64 [T], total variation between the buckets of each step's samples [T, K] and of `counts` [K]."""
    share = samples / np.maximum(samples.sum(axis=1, keepdims=True), 1)
    distance: FloatArray = 0.5 * np.abs(share - counts / counts.sum()).sum(axis=1)
    return distance


def meetings(seconds: FloatArray, sync: Sync) -> FloatArray:
    """float64 [J, R]: each rank's compute time up to each of the J points where ranks meet (absent slots left out)."""
    if sync == "step":
        return seconds.sum(axis=1)
    slots = seconds.reshape(-1, seconds.shape[2])
    return slots[slots.max(axis=1) > 0]


def slowest(seconds: FloatArray, sync: Sync) -> FloatArray:
    """Time of the slowest rank at each meeting of a step, float64 [T, M], or [T, 1] for `step`; seconds [T, M, R]."""
    return seconds.sum(axis=1).max(axis=1)[:, None] if sync == "step" else seconds.max(axis=2)


def rank_cv(met: FloatArray) -> FloatArray:
    """float64 [J], coefficient of variation over the ranks that meet; met [J, R] as from `meetings`."""
    mean = met.mean(axis=1)
    cv: FloatArray = met.std(axis=1) / np.where(mean > 0, mean, 1.0)
    return cv


def bubble(met: FloatArray) -> float:
    """Waiting for the slowest rank as a share of work: sum of maxima / sum of means - 1."""
    return float(met.max(axis=1).sum() / met.mean(axis=1).sum() - 1.0)


def variation(values: FloatArray) -> float:
    """Coefficient of variation (population) of positive values."""
    return float(values.std() / values.mean())


def bucket_cv(schedule: Schedule, seconds: FloatArray) -> float:
    """Coefficient of variation of a micro-batch's cost over the epoch's micro-batches, fillers left out."""
    return variation(seconds[schedule.batch > 0])


def memory_use(schedule: Schedule, m_mem: int) -> float:
    """Tokens of a rank's largest micro-batch in a step, over m_mem; mean over steps and ranks."""
    tokens = schedule.batch * schedule.corpus.tokens[schedule.bucket]
    return float(tokens.max(axis=1).mean() / m_mem)


def pinned_share(schedule: Schedule) -> float:
    """Share of micro-batches that hold a single sample: their cost cannot be lowered."""
    return float(np.count_nonzero(schedule.batch == 1) / np.count_nonzero(schedule.batch))
