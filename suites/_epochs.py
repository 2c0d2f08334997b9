"""What `throughput_measured` has ranks do, and rows from what they answer: schedules to steps, steps to metrics.

Legend: N samples, T steps, M slots, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from repro.balance import assumptions, limits, metrics, policies, replay
from repro.balance.campaign import Setting
from repro.balance.cost import UNIT, MeasuredCost, PowerCost, QuadraticCost
from repro.balance.fit import FORMS, Observations, fit
from repro.balance.models import MODELS
from repro.balance.replay import SoloTimes
from repro.balance.schedule import ABSENT, Schedule, largest_batches
from repro.corpus.shapes import Corpus
from repro.measure.stats import CONFIDENCE, RESAMPLES, Interval, exact, generator, measured, median_interval
from repro.suite import Measurement

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CALIBRATION = "calibration"
"""In the place of a policy: solo times that costs are fitted to."""
POLICIES = ("equal_token", "dual_constraint", "balanced")
SOLO = "solo_at_"
"""Of metrics that hold the solo time of a shape."""
CLAIMED_RANKS = 8
"""The fewest that the paper speaks of."""
SMALL, LARGE = ("wan-1.3b", 6), (assumptions.MODEL, 2)
"""Models and their blocks. What decides claims has the width that they assume; the small one leaves fewer GPUs, which
decide less, the time for more cells."""

MOST_PASSES, PASSES_SECONDS = 3, 0.5
"""Of a solo time: as many passes as take so long, since the host, which short ones wait for, is less even. One pass has
no interval, and those over steps leave out how sure solo times are."""

FEWEST_STEPS = 3
"""Steps below which nothing is said about their correlation."""


def scaled_model(ranks: int) -> tuple[str, int]:
    """Model and blocks that so many GPUs train."""
    return LARGE if ranks >= CLAIMED_RANKS else SMALL


def depth(model: str, layers: int) -> str:
    """For notes."""
    return f"{model} with {layers} of {MODELS[model].layers} blocks"


def solo_shape(metric: str) -> tuple[int, int]:
    """(batch, tokens of a sample) of a metric that begins with SOLO."""
    batch, tokens = metric.removeprefix(SOLO).split("x")
    return int(batch), int(tokens)


@dataclass(frozen=True)
class Costs:
    """One set of solo times in the three forms that policies take."""

    power: PowerCost
    quadratic: QuadraticCost
    table: MeasuredCost


@cache
def costs(times: tuple[tuple[int, int, float], ...], layers: int, source: str) -> Costs:
    """Fitted to solo times, (batch, tokens of a sample, seconds). Raises ValueError for too few of them."""
    batch, tokens, seconds = (np.array(column) for column in zip(*times, strict=True))
    data = Observations(batch, tokens, seconds, layers, np.ones(batch.size, dtype=bool), source)
    power, quadratic, table = (fit(form, data).cost.extrapolating() for form in FORMS)
    return Costs(cast(PowerCost, power), cast(QuadraticCost, quadratic), table)


def policy(setting: Setting, corpus: Corpus, known: Costs) -> policies.Policy:
    """The setting's policy under these costs."""
    linear, square = known.quadratic.b, known.quadratic.c
    return policies.make(
        setting.policy,
        m_mem=setting.m_mem,
        cost=known.table,
        token_budget=setting.token_budget,
        m_comp=setting.m_comp * limits.choose(known.power, corpus.tokens, setting.token_budget).m_comp,
        p=known.power.p,
        quadratic=UNIT * linear / square if square else float("inf"),
    )


def passes(seconds: float) -> int:
    """Passes that the solo time of a shape is the median of, which takes about so long."""
    return min(MOST_PASSES, max(1, round(PASSES_SECONDS / seconds)))


def question(
    schedule: Schedule, solo: Sequence[tuple[int, int]], cost: MeasuredCost, engine: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of `repro.wan.probing_epoch:epoch`. engine: those of `repro.wan.probing.Setting`."""
    buckets, batch = np.array(solo).T
    seconds = cost.seconds(batch, schedule.corpus.tokens[buckets])
    place = {shape: k for k, shape in enumerate(schedule.corpus.shapes)}
    return {
        "setting": dict(engine),
        "shapes": [[s.frames, s.height, s.width] for s in schedule.corpus.shapes],
        "bucket_of": schedule.corpus.bucket_of.tolist(),
        "solo": [[*cell, passes(float(s))] for cell, s in zip(solo, seconds, strict=True)],
        "steps": [
            [[[place[m.shape], m.sample_ids, m.weights] for m in of_rank] for of_rank in step.ranks]
            for step in schedule
        ],
    }


@dataclass(frozen=True)
class Epoch:
    """An epoch as it was scheduled and as it went.

    solo: what `question` asked for. answer: of the ranks. full: int64 [K], the policy's own batch of each bucket.
    """

    setting: Setting
    schedule: Schedule
    full: Ints
    solo: Sequence[tuple[int, int]]
    answer: Mapping[str, Any]

    @cached_property
    def times(self) -> SoloTimes:
        """Median solo times."""
        tokens = self.schedule.corpus.tokens
        passes = zip(self.solo, self.answer["passes"], strict=True)
        return SoloTimes({(b, int(tokens[k])): float(np.median(p)) for (k, b), p in passes})

    @cached_property
    def update(self) -> float:
        """Seconds that a step takes beside its passes."""
        return float(np.median(self.answer["update"]))

    @cached_property
    def wall(self) -> Floats:
        """float64 [T], s."""
        return np.array(self.answer["wall"])

    @cached_property
    def predicted(self) -> Floats:
        """float64 [T], s, of the simulator."""
        return replay.predict(self.schedule, self.times, self.update, self.setting.sync)

    @cached_property
    def work(self) -> Floats:
        """float64 [T], s, of the same samples in perfect balance."""
        return replay.work_seconds(self.schedule, self.setting.layout, self.times, self.update)

    def rows(self, seed: str, device_bytes: int | None) -> list[Measurement]:
        """All rows of the case. seed: text of the case key."""
        s, corpus, wall = self.schedule, self.schedule.corpus, self.wall
        tokens_T = (s.batch * corpus.tokens[s.bucket]).sum(axis=(1, 2)).astype(np.float64)
        mix, work = metrics.mix_distance(s), self.work
        rank_TR, wait_TR = np.array(self.answer["seconds"]), np.array(self.answer["wait"])
        own_TR = rank_TR - wait_TR
        load_TMR = s.batch * corpus.tokens[s.bucket].astype(np.float64) ** 2
        over_ranks, load = metrics.rank_cv(own_TR), metrics.rank_cv(load_TMR.sum(axis=1))

        def steps(metric: str, unit: str, value: Callable[[Ints], float]) -> Measurement:
            return measured(metric, unit, over_steps(value, s.steps, f"{seed}/{metric}"))

        each = s.samples_of_step.astype(np.float64)
        found = [
            # Steps differ in work for the chance of their samples, which an epoch holds all of: so per unit of work.
            steps("tokens_per_s", "1/s", lambda i: tokens_T.sum() / _seconds(wall, work, i)),
            steps("samples_per_s", "1/s", lambda i: corpus.samples / _seconds(wall, work, i)),
            steps("samples_per_step", "samples", lambda i: each[i].mean()),
            steps("share_of_perfect", "fraction", lambda i: work.sum() / _seconds(wall, work, i)),
            steps("mix_distance", "fraction", lambda i: mix[i].mean()),
            steps("load_cv", "fraction", lambda i: load[i].mean()),
            steps("rank_cv", "fraction", lambda i: over_ranks[i].mean()),
            steps("step_cv", "fraction", lambda i: metrics.variation(wall[i])),
            steps("wait_share", "fraction", lambda i: wait_TR[i].sum() / rank_TR[i].sum()),
            steps("replay_error", "%", lambda i: replay.Errors.of(self.predicted[i], wall[i]).each),
            steps("replay_total_error", "%", lambda i: replay.Errors.of(self.predicted[i], wall[i]).total),
            measured("rank_time", "ms", median_interval(1e3 * rank_TR, seed), 1e3 * rank_TR),
            measured("rank_wait", "ms", median_interval(1e3 * wait_TR, seed), 1e3 * wait_TR),
            measured("update_time", "ms", median_interval(self.answer["update"], seed).map(lambda x: 1e3 * x)),
        ]
        found += self._correlations(tokens_T, seed)
        peak_TR = np.array(self.answer["peak_bytes"], np.float64)
        if peak_TR.min() >= 0:
            found.append(steps("peak_memory", "GB", lambda i: peak_TR[i].mean() / 1e9))
            if device_bytes:
                found.append(steps("device_use", "fraction", lambda i: peak_TR[i].mean() / device_bytes))
        found += [
            measured(f"{SOLO}{b}x{corpus.tokens[k]}", "ms", median_interval(1e3 * np.array(passes), seed))
            for (k, b), passes in zip(self.solo, self.answer["passes"], strict=True)
        ]
        for name, seconds in (("step", wall), ("replay", self.predicted), ("work", work)):
            found += [exact(f"{name}_at_{t}", "ms", 1e3 * float(x)) for t, x in enumerate(seconds)]
        return found

    def _correlations(self, tokens_T: Floats, seed: str) -> list[Measurement]:
        """Of step time, over steps whose micro-batches are all full: partial ones come from an epoch's end only."""
        s = self.schedule
        absent = s.bucket == ABSENT
        whole = np.flatnonzero(((s.batch == self.full[s.bucket]) | absent).all(axis=(1, 2)))
        longest = np.where(absent, 0, s.corpus.tokens[s.bucket]).max(axis=(1, 2)).astype(np.float64) ** 2
        wall = self.wall[whole]
        found = []
        for metric, x in (("r_tokens", tokens_T[whole]), ("r_squared", longest[whole])):
            if whole.size >= FEWEST_STEPS and np.ptp(x) > 0:
                interval = over_steps(partial(_pearson, x, wall), whole.size, f"{seed}/{metric}")
                found.append(measured(metric, "R", interval))
        return found


def wanted(schedule: Schedule, setting: Setting) -> list[tuple[int, int]]:
    """(bucket, batch) of all solo times that an epoch's rows need."""
    return replay.micro_batches(schedule, setting.m_mem)


def calibration_shapes(corpus: Corpus, budget: int, m_mem: int) -> list[tuple[int, int]]:
    """(bucket, batch) that costs are fitted to: full micro-batches of both limits, single samples, and between."""
    found = set()
    for k in range(len(corpus.shapes)):
        full, larger = (max(1, limit // int(corpus.tokens[k])) for limit in (budget, m_mem))
        found |= {(k, full), (k, larger), (k, 1), *([(k, round(full**0.5))] if full >= 6 else [])}
    return sorted(found)


def batches(chosen: policies.Policy, corpus: Corpus, m_mem: int) -> Ints:
    """int64 [K], the policy's own batch of each bucket, at most what fits."""
    return np.minimum(chosen.batch_sizes(corpus.tokens), largest_batches(corpus, m_mem))


def over_steps(value: Callable[[Ints], float], steps: int, seed: str) -> Interval:
    """value(all steps) with the percentile bootstrap's 95% interval over steps; NaN draws are left out."""
    picks = generator(seed).integers(0, steps, (RESAMPLES, steps))
    with np.errstate(invalid="ignore", divide="ignore"):
        drawn = np.array([value(pick) for pick in picks], np.float64)
    center = float(value(np.arange(steps)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.nanquantile(drawn, [tail, 1 - tail])
    return Interval(center, min(float(low), center), max(float(high), center), steps)


@dataclass(frozen=True)
class Steps:
    """Step times and the work in them, float64 [T] each, in the same unit."""

    wall: Floats
    work: Floats


def gain(base: Steps, treated: Steps, paired: bool, seed: str) -> Interval:
    """By how many % more samples a second `treated` takes than `base`, over an epoch of the same samples.

    paired: both took the same schedule, so steps are drawn together.
    """
    if paired and base.wall.size != treated.wall.size:
        raise ValueError(f"paired steps must be equally many, got {base.wall.size} and {treated.wall.size}")
    draw = generator(seed)
    own = draw.integers(0, treated.wall.size, (RESAMPLES, treated.wall.size))
    other = own if paired else draw.integers(0, base.wall.size, (RESAMPLES, base.wall.size))
    percent = [
        100 * (_seconds(base.wall, base.work, i) / _seconds(treated.wall, treated.work, j) - 1)
        for i, j in zip(other, own, strict=True)
    ]
    center = 100 * (float(base.wall.sum() / treated.wall.sum()) - 1)
    low, high = np.quantile(percent, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(center, min(float(low), center), max(float(high), center), treated.wall.size)


def _seconds(wall: Floats, work: Floats, steps: Ints) -> float:
    """Seconds of the epoch, were all of its work done at the pace of these steps."""
    return float(work.sum() * wall[steps].sum() / work[steps].sum())


def _pearson(x: Floats, y: Floats, steps: Ints) -> float:
    a, b = x[steps] - x[steps].mean(), y[steps] - y[steps].mean()
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))
