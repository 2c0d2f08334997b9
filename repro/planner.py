"""What the planner computes: batch sizes of each bucket under each policy, step times, expected gains.

Legend: K buckets, S tokens of a sample, B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from repro import plan_gains
from repro.balance import limits, policies
from repro.balance.cost import UNIT, QuadraticCost
from repro.corpus.shapes import Corpus
from repro.plan_gains import Gain
from repro.plan_setup import Costs, PlanError, Setup


@dataclass(frozen=True)
class BucketPlan:
    """batch, seconds: int64 and float64 [K] under one policy: samples of a full micro-batch, its predicted time."""

    batch: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Batch sizes and expectations for one corpus.

    limits: of the paper's rule, from the paper's form of cost. target_seconds: predicted time of the longest bucket's
    full micro-batch. buckets: by policy. gains: in the order of `policies.NAMES`.
    """

    setup: Setup
    corpus: Corpus
    costs: Costs
    limits: limits.Limits
    target_seconds: float
    buckets: Mapping[str, BucketPlan]
    gains: tuple[Gain, ...]
    simulated_samples: int
    warnings: tuple[str, ...] = ()

    @property
    def pinned(self) -> list[str]:
        """What keeps a bucket at one sample under the paper's rule: "memory" or "compute"; "" where nothing does."""
        one = self.buckets["dual_constraint"].batch == 1
        memory = self.limits.m_mem // self.corpus.tokens == 1
        return ["" if not o else "memory" if m else "compute" for o, m in zip(one, memory, strict=True)]

    def best_table(self) -> str:
        """The policy of most gain among those that a table of fixed batch sizes describes, for use in other loaders."""
        fixed = [g for g in self.gains if g.policy not in ("balanced", "longest_first")]
        return max(fixed, key=lambda g: g.gain).policy


def make(setup: Setup, costs: Costs, corpus: Corpus, m_mem: int, seed: int = 0) -> Plan:
    """Plan for `corpus` under a memory limit of `m_mem` tokens.

    Raises PlanError where a bucket exceeds the limit or the measured lengths.
    """
    used = corpus.counts > 0
    corpus = corpus if used.all() else _without_empty(corpus, used)
    _refuse_too_long(setup, costs, corpus, m_mem)
    if setup.token_budget is not None and not 1 <= setup.token_budget <= m_mem:
        raise PlanError(
            f"the baseline's token budget must be 1 to M_mem = {m_mem:,} tokens, got {setup.token_budget:,}"
        )
    chosen = limits.choose(costs.power, corpus.tokens, m_mem)
    cost = costs.quadratic
    rules = {name: _policy(name, chosen, cost, corpus, setup.token_budget) for name in policies.NAMES}
    batches = {name: rule.batch_sizes(corpus.tokens) for name, rule in rules.items()}
    buckets = {name: BucketPlan(b, cost.seconds(b, corpus.tokens)) for name, b in batches.items()}
    gains, simulated = plan_gains.expected(rules, corpus, setup, costs, m_mem, seed)
    return Plan(
        setup=setup,
        corpus=corpus,
        costs=costs,
        limits=chosen,
        target_seconds=limits.target_seconds(cost, corpus.tokens, m_mem),
        buckets=buckets,
        gains=gains,
        simulated_samples=simulated,
        warnings=tuple(_outside(costs, corpus, batches)),
    )


def _policy(
    name: str, chosen: limits.Limits, cost: QuadraticCost, corpus: Corpus, token_budget: int | None
) -> policies.Policy:
    """Every policy at its best under the same memory limit: nobody would run Open-Sora's search at a lower target."""
    if name == "equal_time":
        return policies.EqualTime(chosen.m_mem, cost, limits.target_seconds(cost, corpus.tokens, chosen.m_mem))
    quadratic = UNIT * cost.b / cost.c if cost.c else float("inf")
    return policies.make(
        name,
        m_mem=chosen.m_mem,
        cost=cost,
        token_budget=token_budget,
        m_comp=chosen.m_comp,
        p=chosen.p,
        quadratic=quadratic,
    )


def _without_empty(corpus: Corpus, used: npt.NDArray[np.bool_]) -> Corpus:
    position = np.cumsum(used, dtype=np.int32) - 1
    shapes = tuple(s for s, u in zip(corpus.shapes, used, strict=True) if u)
    return replace(
        corpus, shapes=shapes, tokens=corpus.tokens[used], bucket_of=position[corpus.bucket_of].astype(np.int32)
    )


def _refuse_too_long(setup: Setup, costs: Costs, corpus: Corpus, m_mem: int) -> None:
    k = int(corpus.tokens.argmax())
    longest, sample = int(corpus.tokens[k]), int(np.argmax(corpus.bucket_of == k))
    if longest > m_mem:
        raise PlanError(
            f"sample {sample} of {corpus.name} is {corpus.shapes[k]}, {longest:,} tokens, more than the memory limit "
            f"of {m_mem:,} tokens: use more ranks, more memory, or leave such clips out"
        )
    measured = costs.quadratic.range.tokens[1]
    if longest > measured and not setup.extrapolate:
        raise PlanError(
            f"sample {sample} of {corpus.name} is {corpus.shapes[k]}, {longest:,} tokens; the longest measured on "
            f"{setup.device} is {measured:,}: allow --extrapolate or leave such clips out"
        )


def _outside(costs: Costs, corpus: Corpus, batches: Mapping[str, npt.NDArray[np.int64]]) -> list[str]:
    """One warning that names the buckets whose predicted times are extrapolated."""
    measured = costs.quadratic.range
    tokens = corpus.tokens.astype(np.float64)
    outside = np.any([measured.outside(b.astype(np.float64), tokens) for b in batches.values()], axis=0)
    if not outside.any():
        return []
    which = [str(s) for s, o in zip(corpus.shapes, outside, strict=True) if o]
    named = ", ".join(which[:3]) + (f" and {len(which) - 3} more" if len(which) > 3 else "")
    return [f"step times of {named} are extrapolated: measured were {measured}"]
