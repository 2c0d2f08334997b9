"""Statistics of timing samples: medians and ratios of medians with bootstrap intervals that anyone can recompute.

The percentile bootstrap (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13) treats samples as
independent. The generator is seeded from the case key alone, so the same samples give the same interval anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.suite import Measurement

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval, and the number of samples behind it."""

    value: float
    low: float
    high: float
    n: int

    def map(self, f: Callable[[float], float]) -> Interval:
        """The interval of a monotonic function of the estimate, e.g. bandwidth from time."""
        ends = f(self.low), f(self.high)
        return Interval(f(self.value), min(ends), max(ends), self.n)


def seed_text(suite: str, key: Mapping[str, str | int | float]) -> str:
    """A case's seed for the functions below: the suite's name and every parameter, in the order of their names."""
    return "/".join([suite, *(f"{name}={key[name]}" for name in sorted(key))])


def median_interval(samples: npt.ArrayLike, seed: str, resamples: int = RESAMPLES) -> Interval:
    """Median of samples [n] and its 95% interval.

    seed: text of the case key (`seed_text`). Raises ValueError unless there is at least one sample and all are finite.
    """
    values = _checked(samples)
    medians = _bootstrap_medians(values, generator(seed), resamples)
    return _interval(float(np.median(values)), medians, values.size)


def ratio_interval(
    numerator: npt.ArrayLike, denominator: npt.ArrayLike, seed: str, resamples: int = RESAMPLES
) -> Interval:
    """median(numerator) / median(denominator) and its 95% interval; both sides are resampled, independently.

    A speedup is ratio_interval(baseline's times, treated's times). n is the smaller side's number of samples.
    Raises ValueError as `median_interval`, and where the denominator is not positive.
    """
    top, bottom = _checked(numerator), _checked(denominator)
    if bottom.min() <= 0:
        raise ValueError(f"a ratio needs positive samples in its denominator, got {bottom.min()}")
    draw = generator(seed)
    ratios = _bootstrap_medians(top, draw, resamples) / _bootstrap_medians(bottom, draw, resamples)
    return _interval(float(np.median(top) / np.median(bottom)), ratios, min(top.size, bottom.size))


def measured(metric: str, unit: str, interval: Interval, samples: npt.ArrayLike = ()) -> Measurement:
    """A row of `metric` from an interval, with the raw samples where they are in `unit`."""
    raw = tuple(float(s) for s in np.asarray(samples, dtype=np.float64).ravel())
    return Measurement(metric, unit, interval.value, interval.low, interval.high, interval.n, samples=raw)


def exact(metric: str, unit: str, value: float) -> Measurement:
    """A row of a quantity that is counted, not sampled: its interval is the value itself, n = 1."""
    return Measurement(metric, unit, value, value, value, 1)


def _bootstrap_medians(
    values: npt.NDArray[np.float64], generator: np.random.Generator, resamples: int
) -> npt.NDArray[np.float64]:
    picks = generator.integers(0, values.size, (resamples, values.size))
    return np.median(values[picks], axis=1)


def _interval(value: float, estimates: npt.NDArray[np.float64], n: int) -> Interval:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(estimates, [tail, 1 - tail])
    # With few samples a skewed bootstrap distribution can leave the estimate itself outside by a rounding error.
    return Interval(value, min(float(low), value), max(float(high), value), n)


def generator(seed: str) -> np.random.Generator:
    """The generator of a case: seeded from the text of its key."""
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=16).digest()))


def _checked(samples: npt.ArrayLike) -> npt.NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64).ravel()
    if values.size == 0:
        raise ValueError("at least one sample is needed, got none")
    if not np.isfinite(values).all():
        raise ValueError(f"samples must be finite, got {values[~np.isfinite(values)][:3]}")
    return values
