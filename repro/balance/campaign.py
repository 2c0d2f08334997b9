"""Simulation campaigns: one setting (policy, AdaLN, ranks, corpus, ...) to its metrics over seeded epochs.

Costs and memory come from a device's rows: of the whole model where these were measured, else of blocks
(`repro.balance.whole`). All policies have the same memory limit, and settings that differ in policy or AdaLN only see
the same corpora and the same seeds: their ratios are paired.
Legend: T steps, M slots, R ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from repro.balance import assumptions, limits, metrics, policies, whole
from repro.balance.cost import UNIT, MeasuredCost, PowerCost, QuadraticCost
from repro.balance.fit import Form, measured_cost
from repro.balance.memory import MemoryModel, fit_memory, state_bytes
from repro.balance.models import MODELS, ModelSize
from repro.balance.schedule import Layout, Schedule
from repro.balance.simulate import Communication, Simulation, simulate
from repro.balance.types import Protocols, Sync
from repro.corpus.mixes import TOKEN_BUDGET, mix, named
from repro.corpus.shapes import Corpus

if TYPE_CHECKING:
    import pandas as pd

FloatArray = npt.NDArray[np.float64]

PARAMETERS = (
    "policy",
    "adaln",
    "ranks",
    "corpus",
    "model",
    "sync",
    "micro_batches",
    "protocol",
    "token_budget",
    "m_mem",
    "m_comp",
)
"""Parameter columns of every suite that simulates campaigns. m_comp: in units of B * S^p of the longest bucket's
baseline batch, since p comes from a fit and not from the setting; empty for policies without it."""


@dataclass(frozen=True)
class Effort:
    """How much is simulated: seeds, one epoch each, of about `steps` steps; fewer of both on many ranks.

    micro_batches: of an epoch over all ranks, beyond which it gets fewer steps, though never fewer than `fewest`. An
    epoch's tail may take a step more or less: above 100 steps the samples a step of matched policies agree within 1%.
    """

    seeds: int = 10
    steps: int = 200
    micro_batches: int = 16_000
    fewest: int = 120

    def seeds_on(self, ranks: int) -> int:
        """Seeds on `ranks` ranks: beyond 64 an average over ranks leaves little to chance."""
        return self.seeds if ranks <= 64 else min(self.seeds, 4)

    def steps_on(self, slots: int) -> int:
        """Steps of an epoch with `slots` micro-batches a step over all ranks."""
        return min(self.steps, max(self.fewest, self.micro_batches // slots))


FULL = Effort()
WIDE = Effort(seeds=5, micro_batches=12_000, fewest=30)
"""For lattices of many settings; of few steps on many ranks, where one step is more than 1% of them."""
SMOKE = Effort(seeds=2, steps=20, micro_batches=400, fewest=10)


@dataclass(frozen=True)
class Setting:
    """One cell of a campaign; defaults are what verdicts assume. Fields as the columns of the same names."""

    policy: str
    adaln: str
    ranks: int
    corpus: str = assumptions.CORPUS
    model: str = assumptions.MODEL
    sync: Sync = assumptions.SYNC
    micro_batches: int = 1
    protocol: Protocols = assumptions.PROTOCOL
    token_budget: int = TOKEN_BUDGET
    m_mem: int = assumptions.M_MEM
    m_comp: float = assumptions.M_COMP

    @classmethod
    def of(cls, key: Mapping[str, str | int | float]) -> Setting:
        """The setting of a case key."""
        return cls(
            policy=str(key["policy"]),
            adaln=str(key["adaln"]),
            ranks=int(key["ranks"]),
            corpus=str(key["corpus"]),
            model=str(key["model"]),
            sync=cast(Sync, key["sync"]),
            micro_batches=int(key["micro_batches"]),
            protocol=cast(Protocols, key["protocol"]),
            token_budget=int(key["token_budget"]),
            m_mem=int(key["m_mem"]),
            m_comp=float(key["m_comp"]) if _has_m_comp(str(key["policy"])) else assumptions.M_COMP,
        )

    @property
    def key(self) -> dict[str, str | int | float]:
        """Value of every column in PARAMETERS."""
        values = {name: getattr(self, name) for name in PARAMETERS}
        return values if _has_m_comp(self.policy) else {**values, "m_comp": ""}

    @property
    def layout(self) -> Layout:
        """Ranks, memory limit and protocol. Raises ValueError for a setting that no run can have."""
        return Layout(self.ranks, self.m_mem, self.micro_batches, self.sync, self.protocol)

    def baseline(self) -> Setting:
        """The same under the paper's baseline: equal tokens a micro-batch, eager AdaLN."""
        policy, adaln = assumptions.BASELINE
        return replace(self, policy=policy, adaln=adaln, m_comp=assumptions.M_COMP)


@dataclass(frozen=True)
class Outcome:
    """Metrics of one setting: name to float64 [n], one value a seed, in the units of `metrics.UNITS` and `UNITS`.

    source: run_ids of the rows behind it.
    """

    values: Mapping[str, FloatArray]
    source: str


UNITS: dict[str, str] = {
    **metrics.UNITS,
    "load_cv": "fraction",
    "tokens_per_s_p5": "1/s",
    "cost_raised": "%",
    "peak_memory": "GB",
}
"""Metrics of an outcome. Beyond `metrics.UNITS`: load_cv, CV over ranks of B * S^2 where they meet; tokens_per_s_p5, of
the slowest 5% of steps at most; cost_raised, by how much at most `Amortised` changed a time; peak_memory, mean over
steps and ranks of a rank's peak, parameters and optimizer state included (absent where memory was not measured)."""


@dataclass(frozen=True)
class Amortised:
    """A cost with which smaller batches are never cheaper a sample: B * max of t(b) / b over B <= b <= m_mem / S.

    Measured times of neighbouring batch sizes scatter by a percent or less, and between them the table interpolates a
    form that is off by a few percent at small batches. Without this a policy with smaller batches could come out faster
    than perfect balance of full ones. Times of full batches, which most policies use, stay as they are.
    """

    cost: MeasuredCost
    m_mem: int
    _per_sample: dict[int, FloatArray] = field(default_factory=dict, repr=False, compare=False)

    def seconds(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> FloatArray:
        """Seconds of micro-batches of `batch` samples of `tokens` tokens each (broadcast together).

        Batches beyond m_mem cost what they cost.
        """
        b, s = np.broadcast_arrays(np.asarray(batch, np.int64), np.asarray(tokens, np.int64))
        result = np.empty(b.shape)
        for length in np.unique(s):
            per_sample = self._most(int(length))
            within = (s == length) & (b <= per_sample.size)
            result[within] = b[within] * per_sample[b[within] - 1]
            beyond = (s == length) & (b > per_sample.size)
            if beyond.any():
                result[beyond] = self.cost.seconds(b[beyond], length)
        return result

    def raised(self, batch: npt.ArrayLike, tokens: npt.ArrayLike) -> float:
        """Largest share by which a time is higher than the cost's own."""
        return float(np.max(self.seconds(batch, tokens) / self.cost.seconds(batch, tokens) - 1, initial=0.0))

    def _most(self, tokens: int) -> FloatArray:
        if tokens not in self._per_sample:
            sizes = np.arange(1, max(1, self.m_mem // tokens) + 1)
            own = self.cost.seconds(sizes, tokens) / sizes
            self._per_sample[tokens] = np.maximum.accumulate(own[::-1])[::-1]
        return self._per_sample[tokens]


class Campaign:
    """Simulates settings on one device's rows; what several settings share is computed once."""

    def __init__(self, rows: pd.DataFrame, effort: Effort = FULL) -> None:
        self._rows = rows[rows["suite"].isin(whole.SUITES)]
        self._effort = effort
        self.cost = cache(self._cost)
        self.run = cache(self._run)
        self._fitted = cache(self._fit)
        self._memory = cache(self._fit_memory)

    def paired(self, setting: Setting, other: Setting, metric: str) -> FloatArray:
        """float64 [n], metric of `setting` over that of `other`, seed by seed. Raises KeyError for an unknown one."""
        return self.run(setting).values[metric] / self.run(other).values[metric]

    def policy(self, setting: Setting) -> policies.Policy:
        """The setting's policy with what the fits give it.

        The baseline's batch of the longest bucket sets the pace: M_comp, and the target of `equal_time`.
        Raises KeyError for an unknown policy, ValueError where rows are missing.
        """
        power = cast(PowerCost, self._fitted(setting.model, setting.adaln, "power"))
        quadratic = cast(QuadraticCost, self._fitted(setting.model, setting.adaln, "quadratic"))
        cost, tokens = self.cost(setting.model, setting.adaln, setting.m_mem), self._corpus(setting).tokens
        if setting.policy == "equal_time":
            target = limits.target_seconds(cost, tokens, setting.token_budget)
            return policies.EqualTime(setting.m_mem, cost, target)
        return policies.make(
            setting.policy,
            m_mem=setting.m_mem,
            cost=cost,
            token_budget=setting.token_budget,
            m_comp=setting.m_comp * limits.choose(power, tokens, setting.token_budget).m_comp,
            p=power.p,
            quadratic=UNIT * quadratic.b / quadratic.c if quadratic.c else float("inf"),
        )

    # The methods below are called through the caches made in __init__.

    def _cost(self, model: str, adaln: str, m_mem: int) -> Amortised:
        """Measured times at the model's full depth. Raises ValueError where rows are missing."""
        return Amortised(self._fitted(model, adaln, "table"), m_mem)

    def _fit(self, model: str, adaln: str, form: Form) -> MeasuredCost:
        return measured_cost(self._rows, model, adaln, form).extrapolating()

    def _fit_memory(self, model: str, adaln: str) -> MemoryModel | None:
        try:
            return fit_memory(self._rows, model, adaln).model
        except ValueError:
            return None

    def _corpus(self, setting: Setting) -> Corpus:
        """The same for all policies and AdaLNs: as many samples as give the reference about `steps` steps."""
        budget = setting.token_budget if setting.protocol == "as_published" else setting.m_mem
        slots = setting.ranks * setting.micro_batches
        return _corpus(setting.corpus, budget, slots * self._effort.steps_on(slots))

    def _run(self, setting: Setting) -> Outcome:
        corpus, layout, policy = self._corpus(setting), setting.layout, self.policy(setting)
        cost, memory = (
            self.cost(setting.model, setting.adaln, setting.m_mem),
            self._memory(setting.model, setting.adaln),
        )
        model = MODELS[setting.model]
        found: dict[str, list[float]] = {}
        for seed in range(self._effort.seeds_on(setting.ranks)):
            schedule = policy.schedule(corpus, layout, seed)
            run = simulate(schedule, cost, layout, _communication(model))
            values = {name: run.metric(name) for name in metrics.UNITS}
            values |= _extra(schedule, run, cost, setting.sync)
            if memory is not None:
                values["peak_memory"] = _peak_gb(schedule, memory, model, setting)
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        return Outcome({name: np.array(v) for name, v in found.items()}, cost.cost.source)


def _has_m_comp(policy: str) -> bool:
    return policy.startswith("dual_constraint")


_campaigns: dict[str, dict[Effort, Campaign]] = {}


def campaign(rows: pd.DataFrame, effort: Effort = FULL) -> Campaign:
    """The campaign of these rows; one for as long as those that it stands on are the same."""
    own = rows[rows["suite"].isin(whole.SUITES)]
    columns = own[["run_id", "suite", "model", "adaln", "layers", "batch", "tokens", "metric", "value"]]
    digest = hashlib.blake2b(columns.to_csv(index=False).encode()).hexdigest()
    if digest not in _campaigns:
        _campaigns.clear()  # rows change when something new was measured: the old ones are not asked for again
        _campaigns[digest] = {}
    return _campaigns[digest].setdefault(effort, Campaign(own, effort))


@cache
def _corpus(name: str, budget: int, micro_batches: int) -> Corpus:
    """Corpus `name` with the samples of so many micro-batches of `budget` tokens."""
    weights = np.array(mix(name).weights)
    batch = np.maximum(1, budget // named(name, 1).tokens)
    return named(name, samples=round(micro_batches * weights.sum() / (weights / batch).sum()))


def _communication(model: ModelSize) -> Communication:
    n, bandwidth = float(model.parameters), assumptions.BUS_BANDWIDTH
    return Communication(2 * n, 4 * n, all_gather=bandwidth, reduce_scatter=bandwidth, overlap=assumptions.OVERLAP)


def _extra(schedule: Schedule, run: Simulation, cost: Amortised, sync: Sync) -> dict[str, float]:
    tokens = schedule.corpus.tokens[schedule.bucket]
    load = schedule.batch * tokens.astype(np.float64) ** 2
    of_step = (schedule.batch * tokens).sum(axis=(1, 2))
    used, batch = np.divmod(np.unique((schedule.bucket * 10**6 + schedule.batch)[schedule.batch > 0]), 10**6)
    return {
        "load_cv": float(metrics.rank_cv(metrics.meetings(load, sync)).mean()),
        "tokens_per_s_p5": float(np.quantile(of_step / run.step_seconds, 0.05)),
        "cost_raised": 100 * cost.raised(batch, schedule.corpus.tokens[used]),
    }


def _peak_gb(schedule: Schedule, memory: MemoryModel, model: ModelSize, setting: Setting) -> float:
    peak = memory.bytes(schedule.batch, schedule.corpus.tokens[schedule.bucket], model.layers).max(axis=1)
    return (float(peak.mean()) + state_bytes(model, setting.ranks, setting.sync)) / 1e9
