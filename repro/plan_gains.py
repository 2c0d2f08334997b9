"""What each policy would gain: simulated epochs, compared seed by seed, with the uncertainty of both their causes.

No training run was measured, so every figure is simulated. Its uncertainty has two parts, drawn together: which
samples an epoch draws (seeds), and how far the cost model is off. The latter is taken from its own errors at lengths
that it was not fitted to: each bucket's time is off by a factor of its own, policies decide with the nominal cost, and
both sides of a gain are simulated with the same factors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from repro.balance.policies import Policy
from repro.balance.schedule import Layout
from repro.balance.simulate import Communication, Simulation, simulate
from repro.balance.types import Cost
from repro.corpus.mixes import apportion
from repro.corpus.shapes import Corpus
from repro.plan_setup import Costs, Setup

BASELINE = "equal_token"
SEEDS = 3
COST_DRAWS = 20

_STEPS = 150
"""Optimizer steps that a simulated epoch should have: an epoch's uneven tail is then under 1% of it."""
_SAMPLES = (20_000, 1_000_000)
"""Fewest and most samples of a simulated epoch; a larger corpus is thinned, its shares kept within 1 / 20,000."""


@dataclass(frozen=True)
class Gain:
    """One policy's simulated epochs. gain: samples/s over the baseline's - 1, with its 95% interval."""

    policy: str
    samples_per_s: float
    gain: float
    low: float
    high: float
    share_of_perfect: float
    mix_distance: float
    rank_cv: float
    memory_use: float
    samples_per_step: float


def expected(
    rules: Mapping[str, Policy], corpus: Corpus, setup: Setup, costs: Costs, m_mem: int, seed: int = 0
) -> tuple[tuple[Gain, ...], int]:
    """Gains of the policies, in their order, and the samples of a simulated epoch. `rules` must have the baseline."""
    layout = Layout(setup.ranks, m_mem, setup.micro_batches, setup.sync, "matched")
    thinned = _thinned(corpus, setup, rules[BASELINE].batch_sizes(corpus.tokens), seed)
    return _gains(rules, thinned, layout, costs, _communication(setup), seed), thinned.samples


@dataclass(frozen=True)
class _OffCost:
    """A cost that is off by its own factor in every bucket. tokens: int64 [K] increasing. factor: float64 [K]."""

    cost: Cost
    tokens: npt.NDArray[np.int64]
    factor: npt.NDArray[np.float64]

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        return self.cost.seconds(batch, tokens) * self.factor[np.searchsorted(self.tokens, np.asarray(tokens))]


def _thinned(corpus: Corpus, setup: Setup, batch: npt.NDArray[np.int64], seed: int) -> Corpus:
    """The corpus, or a random one of the same shares that is large enough for `_STEPS` steps."""
    micro_batches = float((corpus.counts / batch).sum())
    per_step = corpus.samples / micro_batches * setup.ranks * setup.micro_batches
    wanted = int(np.clip(_STEPS * per_step, *_SAMPLES))
    if wanted >= corpus.samples:
        return corpus
    buckets = np.repeat(np.arange(corpus.tokens.size, dtype=np.int32), apportion(corpus.counts, wanted))
    return replace(corpus, bucket_of=np.random.default_rng(seed).permutation(buckets))


def _communication(setup: Setup) -> Communication | None:
    """bf16 parameters are gathered, fp32 gradients reduced; bandwidth is the same for both."""
    if setup.bandwidth is None:
        return None
    n = float(setup.model.parameters)
    return Communication(2 * n, 4 * n, all_gather=setup.bandwidth, reduce_scatter=setup.bandwidth)


def _gains(
    rules: Mapping[str, Policy],
    corpus: Corpus,
    layout: Layout,
    costs: Costs,
    communication: Communication | None,
    seed: int,
) -> tuple[Gain, ...]:
    nominal = {name: list[Simulation]() for name in rules}
    paired = {name: list[float]() for name in rules}
    off = _off_costs(costs, corpus, seed)
    for s in range(seed, seed + SEEDS):
        baseline: list[float] = []
        for name in (BASELINE, *(n for n in rules if n != BASELINE)):
            schedule = rules[name].schedule(corpus, layout, s)
            nominal[name].append(simulate(schedule, costs.quadratic, layout, communication))
            rates = [simulate(schedule, c, layout, communication).samples_per_s for c in off]
            baseline = baseline or rates
            paired[name] += [rate / base - 1 for rate, base in zip(rates, baseline, strict=True)]

    def mean(name: str, metric: str) -> float:
        return float(np.mean([getattr(run, metric) for run in nominal[name]]))

    reference = mean(BASELINE, "samples_per_s")
    found = []
    for name in rules:
        gain = mean(name, "samples_per_s") / reference - 1
        low, high = np.quantile(paired[name], [0.025, 0.975])
        found.append(
            Gain(
                policy=name,
                samples_per_s=mean(name, "samples_per_s"),
                gain=gain,
                low=min(float(low), gain),
                high=max(float(high), gain),
                share_of_perfect=mean(name, "share_of_perfect"),
                mix_distance=mean(name, "mix_distance"),
                rank_cv=mean(name, "rank_cv"),
                memory_use=mean(name, "memory_use"),
                samples_per_step=mean(name, "samples_per_step"),
            )
        )
    return tuple(found)


def _off_costs(costs: Costs, corpus: Corpus, seed: int) -> list[_OffCost]:
    """COST_DRAWS costs that are wrong as the fit was at held-out lengths: 1 / (1 + error), drawn for each length."""
    tokens = np.unique(corpus.tokens)
    rng = np.random.default_rng([seed, 1])
    draws = rng.choice(costs.errors, (COST_DRAWS, tokens.size))
    return [_OffCost(costs.quadratic, tokens, 1 / (1 + draw)) for draw in draws]
