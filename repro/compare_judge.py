"""FASTER, SLOWER, SAME or AMBIGUOUS: two sets of samples of one device, by a rank test and an interval.

The ratio is that of the medians, new over old, oriented so that above 1 is slower. With a threshold of 5%:

    SLOWER      the ranks differ (Mann and Whitney, 1947; p < 0.05), and the whole 95% interval lies above 1.05
    FASTER      the ranks differ, and the whole interval lies below 1 / 1.05
    SAME        the whole interval lies between: whatever the ranks say, it does not matter
    AMBIGUOUS   anything else, and where either side has no samples, or fewer than four

Samples of one run share its clocks, its temperature and its neighbours, which no interval over them covers: the same
code an hour later may lie far outside. Where a suite times plain streams (impl `stream`), whose code is nobody's here,
they are the control: what they moved by between the two measurements, others must have moved by more to be FASTER or
SLOWER, and are AMBIGUOUS where they have not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from repro.measure.stats import ratio_interval

Word = Literal["FASTER", "SLOWER", "SAME", "AMBIGUOUS"]
WORDS: tuple[Word, ...] = ("SLOWER", "FASTER", "AMBIGUOUS", "SAME")

THRESHOLD = 0.05
SIGNIFICANCE = 0.05
FEWEST = 4
"""Samples below which no verdict is given: of two times three, ranks that differ entirely are 10% likely by chance."""
MOST = 2000
"""Samples beyond which every k-th is taken: more do not change a 95% interval, and resampling them takes minutes."""

_TIMES = ("ns", "us", "ms", "s")


@dataclass(frozen=True)
class Judgement:
    """word: the verdict. ratio with its 95% interval: above 1 is slower. p: of the rank test. why: of AMBIGUOUS."""

    word: Word
    ratio: float
    low: float
    high: float
    p: float
    why: str = ""


def direction(unit: str) -> int:
    """1 where less is faster (a time), -1 where more is (a rate), 0 where a quantity is neither."""
    return 1 if unit in _TIMES else -1 if unit.endswith("/s") else 0


def moved(old: npt.ArrayLike, new: npt.ArrayLike) -> float:
    """How far medians `new` lie from medians `old`, as the largest relative change either way; 0 for none."""
    before, after = np.asarray(old, np.float64), np.asarray(new, np.float64)
    known = (before > 0) & (after > 0)
    return float(np.expm1(np.abs(np.log(after[known] / before[known])).max())) if known.any() else 0.0


def judge(
    old: npt.NDArray[np.float64],
    new: npt.NDArray[np.float64],
    unit: str,
    seed: str,
    threshold: float = THRESHOLD,
    drift: float = 0.0,
) -> Judgement:
    """Compare samples in `unit`, a time or a rate. seed: of the bootstrap, the text of the case.

    drift: by how much the control moved; what is FASTER or SLOWER must have moved by more.
    Raises ValueError for another unit, or a threshold that is not above 0.
    """
    from scipy import stats

    if not direction(unit):
        raise ValueError(f"a verdict needs a time or a rate, got a quantity in {unit!r}")
    if threshold <= 0:
        raise ValueError(f"threshold must be above 0, got {threshold}")
    fewest = min(old.size, new.size)
    if fewest < FEWEST:
        return _unknown("no samples" if fewest == 0 else f"{fewest} samples, want {FEWEST}")
    if min(old.min(), new.min()) <= 0:
        return _unknown("a sample is not above 0")
    old, new = (s[:: -(-s.size // MOST)] for s in (old, new))
    ratio = ratio_interval(*((new, old) if direction(unit) > 0 else (old, new)), seed)
    p = float(stats.mannwhitneyu(old, new, alternative="two-sided").pvalue)
    found = (ratio.value, ratio.low, ratio.high, p)

    def beyond(share: float) -> bool:
        return ratio.low > 1 + share or ratio.high < 1 / (1 + share)

    if 1 / (1 + threshold) <= ratio.low and ratio.high <= 1 + threshold:
        return Judgement("SAME", *found)
    if beyond(max(threshold, drift)) and p < SIGNIFICANCE:
        return Judgement("SLOWER" if ratio.low > 1 else "FASTER", *found)
    if not beyond(threshold):
        return Judgement("AMBIGUOUS", *found, f"the interval crosses {threshold:.0%}")
    why = f"p = {p:.2g}" if p >= SIGNIFICANCE else f"plain streams moved by {drift:.0%}"
    return Judgement("AMBIGUOUS", *found, why)


def _unknown(why: str) -> Judgement:
    return Judgement("AMBIGUOUS", np.nan, np.nan, np.nan, np.nan, why)
