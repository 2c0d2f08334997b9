"""Costs and limits of the very run that is about to train, measured before it starts.

The shape benchmarking of AdaptiveLoad (arXiv 2605.17923, "no hand tuning"): micro-batches go forward and backward
through the sharded model (`repro.wan.sweep`); M_mem is bisected, a cost is fitted, and the batch policy follows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from repro.balance.cost import PowerCost, QuadraticCost
from repro.balance.fit import FOLDS, Observations, fit
from repro.balance.models import ModelSize
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan.batching import Costs
from repro.wan.sweep import MARGIN, WARM_UP, Probe, Sweep

RESOLUTION = 0.05
"""The bisection of M_mem ends once the bounds are this close."""
_LENGTHS = max(6, FOLDS)


@dataclass(frozen=True)
class Calibration:
    """m_mem: tokens a micro-batch. probes: what was measured. costs: fitted to those that fit. error: held out, %."""

    m_mem: int
    probes: tuple[Probe, ...]
    costs: Costs
    error: float


def calibrate(
    sweep: Sweep,
    size: ModelSize,
    corpus: Corpus,
    minutes: float,
    m_mem: int | None,
    say: Callable[[str], None],
    accumulates: bool = True,
) -> Calibration:
    """Sweep for about `minutes`, then fit.

    m_mem: tokens a micro-batch; None to find out what fits, which needs a GPU. Finding it, and the fewest shapes that a
    fit needs, take as long as they take; batches are as large as the time allows, and larger ones extrapolated.
    accumulates: a step may have several micro-batches.
    Raises ValueError where not one sample of the longest shape fits.
    """
    deadline = time.monotonic() + 60 * minutes
    ended = sweep.ended
    if ended is not None:
        say(f"shapes as measured before: {sweep.path}")
    else:
        say(f"measuring for about {minutes:g} minutes: seconds of forward and backward of B samples of a shape")
        shapes = sweep_shapes(corpus)
        if m_mem is None:
            budget = sweep.memory_budget(accumulates)
            m_mem = find_m_mem(lambda s, b: sweep.probe(s, b, timed=False), shapes, budget, say)
        _sweep(sweep, size, shapes, deadline, m_mem, say)
        ended = m_mem
    m_mem, probes = ended, sweep.recorded()
    fitting = [p for p in probes if p.fits and not math.isnan(p.seconds)]
    data = Observations(
        np.array([p.batch for p in fitting], dtype=np.int64),
        np.array([p.tokens for p in fitting], dtype=np.int64),
        np.array([p.seconds for p in fitting]),
        size.layers,
        np.ones(len(fitting), dtype=bool),
        "calibration",
    )
    power, quadratic = fit("power", data), fit("quadratic", data)
    costs = Costs(
        cast(PowerCost, power.cost.extrapolating()),
        cast(QuadraticCost, quadratic.cost.extrapolating()),
        f"{len(fitting)} shapes measured by this run; held-out error {power.held_out_mape:.1f}% (power), "
        f"{quadratic.held_out_mape:.1f}% (quadratic)",
    )
    say(f"fitted, in seconds: {costs.power}, and {costs.quadratic}")
    return Calibration(m_mem, tuple(probes), costs, quadratic.held_out_mape)


def _sweep(
    sweep: Sweep, size: ModelSize, shapes: list[Shape], deadline: float, m_mem: int, say: Callable[[str], None]
) -> None:
    """Measure until `deadline`."""
    alone = sweep.probe(shapes[-1], 1)
    most = affordable(size, shapes, m_mem, alone.seconds, sweep.seconds_left(deadline))
    if most < m_mem:
        say(f"  timed up to {most:,} tokens a micro-batch, more would take too long; time is linear in B beyond")
    for i, (shape, batch) in enumerate(cases(shapes, most)):
        if i >= 2 * len(shapes) and sweep.seconds_left(deadline) <= 0:
            break
        p = sweep.probe(shape, batch)
        say(f"  {shape!s:>12} x {batch:<5,} {p.seconds:8.3f} s" if p.fits else f"  {shape} x {batch} does not fit")
    sweep.end(m_mem)


def affordable(size: ModelSize, shapes: list[Shape], m_mem: int, seconds_alone: float, seconds: float) -> int:
    """Tokens of the largest micro-batches of `shapes` (by length) that can be timed within `seconds`.

    seconds_alone: of one sample of the longest shape, from which the others are estimated by FLOPs. At most m_mem; not
    below one sample of the longest. Each shape is passed through twice, in full micro-batches and alone.
    """
    tokens = np.array([Tokenizer().tokens(s) for s in shapes])
    rate = seconds_alone / float(size.forward_flops(1, tokens[-1]))
    most = m_mem
    while most > tokens[-1]:
        passes = size.forward_flops(np.maximum(1, most // tokens), tokens) + size.forward_flops(1, tokens)
        if (1 + WARM_UP) * rate * float(np.sum(passes)) <= seconds:
            break
        most = max(most // 2, int(tokens[-1]))
    return most


def sweep_shapes(corpus: Corpus) -> list[Shape]:
    """The corpus' shapes of distinct lengths, by length; where these are too few for a fit, parts of the longest too.

    At most `_LENGTHS` + 2, evenly spaced, the shortest and the longest among them.
    """
    used = [corpus.shapes[k] for k in np.flatnonzero(corpus.counts)]
    tokens = Tokenizer().tokens
    by_length = {tokens(s): s for s in used}
    longest = max(by_length.values(), key=tokens)
    shorter = [Shape(f, longest.height, longest.width) for f in range(longest.frames - 4, 0, -4)]
    lower = [Shape(longest.frames, longest.height * i // 8 // 16 * 16, longest.width) for i in (6, 4, 2, 7, 5, 3)]
    for shape in [*shorter[::2], *shorter[1::2], *(s for s in lower if s.height)]:
        if len(by_length) >= _LENGTHS:
            break
        by_length.setdefault(tokens(shape), shape)
    ordered = [by_length[n] for n in sorted(by_length)]
    picks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _LENGTHS + 2)).round().astype(int))
    return [ordered[i] for i in picks]


def cases(shapes: list[Shape], m_mem: int) -> Iterator[tuple[Shape, int]]:
    """B and S of the sweep, the most telling first: full micro-batches, single samples, then what lies between."""
    most = [max(1, m_mem // Tokenizer().tokens(s)) for s in shapes]
    seen = set()
    middles = ([round(b**0.5) for b in most], [round(b**0.75) for b in most], [round(b**0.25) for b in most])
    for sizes in (most, [1] * len(shapes), *middles):
        for shape, batch in zip(shapes, sizes, strict=True):
            if (shape, batch) not in seen:
                seen.add((shape, batch))
                yield shape, batch


def find_m_mem(
    probe: Callable[[Shape, int], Probe], shapes: list[Shape], budget: int | None, say: Callable[[str], None]
) -> int:
    """Tokens of the largest micro-batch within `budget` bytes, by bisection over batches of the shortest shape.

    The shortest shape needs most memory a token, since every sample brings its text along. A batch is only tried where
    the line through what was measured says that it fits, so memory runs out, if ever, close to its limit.
    Raises ValueError without a budget, and where one sample of the longest shape, or as many tokens of the shortest, do
    not fit.
    """
    if budget is None:
        raise ValueError("memory is not measured on CPUs: give --m-mem TOKENS")
    tokens = Tokenizer().tokens
    shortest, longest = shapes[0], shapes[-1]

    def fits(p: Probe) -> bool:
        return p.fits and p.peak_bytes <= budget

    alone = probe(longest, 1)
    if not fits(alone):
        raise ValueError(f"one sample of {longest} ({tokens(longest):,} tokens) does not fit: use more ranks")
    low = probe(shortest, max(1, tokens(longest) // tokens(shortest) // 2))
    at_one = probe(shortest, 1)
    high: int | None = None
    while fits(low) and (high is None or high - low.batch > max(1, RESOLUTION * low.batch)):
        slope = max(1.0, (low.peak_bytes - at_one.peak_bytes) / max(1, low.batch - at_one.batch))
        by_line = low.batch + int((budget - low.peak_bytes) / slope)
        batch = min(by_line, 4 * low.batch if high is None else (low.batch + high) // 2)
        if batch <= low.batch:
            break
        tried = probe(shortest, batch)
        low, high = (tried, high) if fits(tried) else (low, batch)
    found = low.batch * tokens(shortest)
    if not fits(low) or found < tokens(longest):
        found = tokens(longest)
        full = found // tokens(shortest)
        slope = max(1.0, (low.peak_bytes - at_one.peak_bytes) / max(1, low.batch - at_one.batch))
        by_line = fits(low) and low.peak_bytes + slope * (full - low.batch) <= budget
        if not by_line or (full > low.batch and not fits(probe(shortest, full))):
            raise ValueError(
                f"one sample of {longest} ({found:,} tokens) fits, {full} of {shortest}, as many tokens, do not: use "
                f"more ranks, leave out the longest clips, or give --m-mem {found} at your own risk"
            )
    say(f"M_mem {found:,} tokens: {MARGIN:.0%} of memory kept free, to {RESOLUTION:.0%}")
    return found
