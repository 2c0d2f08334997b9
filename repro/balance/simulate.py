"""Simulated epochs: step times of a schedule from the cost of its micro-batches and from communication.

Assumed: a micro-batch takes what `Cost` says, on every rank and every time (no jitter); ranks wait for the slowest
where they meet; collectives cost their bytes over a measured bus bandwidth, of which `overlap` hides under compute.
Legend: T steps, M slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.balance import metrics
from repro.balance.policies import Policy
from repro.balance.schedule import Layout, Schedule
from repro.balance.types import Cost, Sync
from repro.corpus.shapes import Corpus

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Communication:
    """Collectives of one training step.

    parameter_bytes: of the whole model as all-gathered. gradient_bytes: as reduce-scattered. all_gather,
    reduce_scatter: measured bus bandwidths, bytes/s, taken to hold at any number of ranks. overlap: part of the shorter
    of compute and communication that the longer hides; 1 where collectives of one layer run under the compute of
    another, as full sharding prefetches them.

    Raises ValueError for a negative size, a bandwidth that is not positive or an overlap outside 0..1.
    """

    parameter_bytes: float
    gradient_bytes: float
    all_gather: float
    reduce_scatter: float
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if self.parameter_bytes < 0 or self.gradient_bytes < 0:
            raise ValueError(f"bytes must not be negative, got {self.parameter_bytes} and {self.gradient_bytes}")
        if self.all_gather <= 0 or self.reduce_scatter <= 0:
            raise ValueError(f"bandwidths must be positive, got {self.all_gather} and {self.reduce_scatter} bytes/s")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap must lie in 0..1, got {self.overlap}")

    def seconds(self, ranks: int, sync: Sync) -> float:
        """Seconds of the collectives between two meetings of the ranks.

        `micro_batch`: parameters gathered for the forward and again for the backward pass, gradients reduced. `step`:
        parameters gathered once and kept, gradients reduced once. A ring moves (R - 1) / R of the bytes.
        """
        gathers = 2 if sync == "micro_batch" else 1
        moved = gathers * self.parameter_bytes / self.all_gather + self.gradient_bytes / self.reduce_scatter
        return (ranks - 1) / ranks * moved


@dataclass(frozen=True)
class Simulation:
    """One simulated epoch. Units as in `metrics.UNITS`; step_seconds: float64 [T]."""

    samples_per_s: float
    tokens_per_s: float
    samples_per_step: float
    share_of_perfect: float
    mix_distance: float
    bucket_cv: float
    rank_cv: float
    step_cv: float
    bubble: float
    max_wait_steps: float
    backlog_steps: float
    memory_use: float
    pinned_share: float
    step_seconds: FloatArray

    def metric(self, name: str) -> float:
        """Value of the metric `name` of `metrics.UNITS`. Raises KeyError for any other."""
        if name not in metrics.UNITS:
            raise KeyError(name)
        return float(getattr(self, name))


@dataclass(frozen=True)
class Epochs:
    """Simulated epochs of one policy, one for each seed. Two policies with the same seeds are paired seed by seed."""

    seeds: tuple[int, ...]
    epochs: tuple[Simulation, ...]

    def samples(self, name: str) -> FloatArray:
        """float64 [len(seeds)], one metric over the epochs. Raises KeyError for an unknown one."""
        return np.array([epoch.metric(name) for epoch in self.epochs])

    def mean(self, name: str) -> float:
        """Mean of one metric over the epochs. Raises KeyError for an unknown one."""
        return float(self.samples(name).mean())


def simulate(schedule: Schedule, cost: Cost, layout: Layout, communication: Communication | None = None) -> Simulation:
    """Simulate one epoch; communication None for compute alone.

    Raises ValueError where the schedule is for other ranks than the layout, or where it comes out faster than perfect
    balance: then full micro-batches are not the cheapest under this cost and the share would mean nothing.
    """
    if schedule.ranks != layout.ranks:
        raise ValueError(f"schedule is for {schedule.ranks} ranks, layout has {layout.ranks}")
    seconds = metrics.compute_seconds(schedule, cost)
    met = metrics.meetings(seconds, layout.sync)
    step_seconds = _step_seconds(schedule, seconds, layout.sync, communication)
    total = float(step_seconds.sum())
    share = metrics.perfect_seconds(schedule.corpus, layout.m_mem, cost) / (layout.ranks * total)
    if share > 1 + 1e-9:
        raise ValueError(
            f"share of perfect balance is {share:.6f}, above 1: micro-batches of m_mem = {layout.m_mem} tokens are not "
            "the cheapest a sample under this cost, or the schedule exceeds m_mem"
        )
    corpus = schedule.corpus
    return Simulation(
        samples_per_s=corpus.samples / total,
        tokens_per_s=float((corpus.counts * corpus.tokens).sum()) / total,
        samples_per_step=corpus.samples / schedule.steps,
        share_of_perfect=min(share, 1.0),  # above 1 by rounding only
        mix_distance=float(metrics.mix_distance(schedule).mean()),
        bucket_cv=metrics.bucket_cv(schedule, seconds),
        rank_cv=float(metrics.rank_cv(met).mean()),
        step_cv=metrics.variation(step_seconds),
        bubble=metrics.bubble(met),
        max_wait_steps=float(schedule.max_wait_steps),
        backlog_steps=schedule.backlog_steps,
        memory_use=metrics.memory_use(schedule, layout.m_mem),
        pinned_share=metrics.pinned_share(schedule),
        step_seconds=step_seconds,
    )


def simulate_epochs(
    policy: Policy,
    corpus: Corpus,
    layout: Layout,
    cost: Cost,
    seeds: Iterable[int] = range(5),
    communication: Communication | None = None,
) -> Epochs:
    """Simulate one epoch for each seed. Raises as `Policy.schedule` and `simulate`."""
    seeds = tuple(seeds)
    epochs = (simulate(policy.schedule(corpus, layout, seed), cost, layout, communication) for seed in seeds)
    return Epochs(seeds, tuple(epochs))


def _step_seconds(
    schedule: Schedule, seconds: FloatArray, sync: Sync, communication: Communication | None
) -> FloatArray:
    """float64 [T] from compute seconds [T, M, R]: the slowest rank at each meeting, plus communication in sight."""
    compute = metrics.slowest(seconds, sync)
    if communication is None:
        total: FloatArray = compute.sum(axis=1)
        return total
    moved = np.where(compute > 0, communication.seconds(schedule.ranks, sync), 0.0)
    total = (compute + moved - communication.overlap * np.minimum(compute, moved)).sum(axis=1)
    return total
