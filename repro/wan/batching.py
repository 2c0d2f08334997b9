"""From a corpus and a few options to a batch policy: costs from this GPU's measurements where there are any."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from repro.balance import limits, policies
from repro.balance.cost import UNIT, PowerCost, QuadraticCost, Range
from repro.balance.fit import measured_cost
from repro.balance.models import TEXT_TOKENS, ModelSize
from repro.balance.policies import Policy
from repro.balance.schedule import Layout
from repro.balance.types import Protocols
from repro.corpus.mixes import TOKEN_BUDGET
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.plan_file import one_device
from repro.records import Store

NOMINAL_FLOPS = 1e15
"""What `flop_costs` divide by; policies compare costs, so its value changes nothing."""


@dataclass(frozen=True)
class Mode:
    """A policy with an AdaLN implementation, and the protocol of `Layout` that it is trained under."""

    policy: str
    adaln: str
    protocol: Protocols

    def protocol_of(self, micro_batches: int) -> Protocols:
        """The protocol of so many micro-batches a step and rank: `as_published` means one."""
        return self.protocol if micro_batches == 1 else "matched"


MODES = {
    # The paper mentions no gradient accumulation: one micro-batch a step and rank, whatever samples that gives.
    "baseline": Mode("equal_token", "eager", "as_published"),
    "adaptiveload": Mode("dual_constraint", "fused", "as_published"),
    "balanced": Mode("balanced", "fused", "matched"),
}


@dataclass(frozen=True)
class Costs:
    """power: the form of the paper's rule. quadratic: for every other policy. source: where they come from."""

    power: PowerCost
    quadratic: QuadraticCost
    source: str


@dataclass(frozen=True)
class BatchLimits:
    """m_mem: tokens of the largest micro-batch. token_budget: equal-token's, None for m_mem. m_comp, p: of the paper's
    rule, None for what costs give: the power of the cost, and the longest bucket's batch within the token budget.

    Raises ValueError for an m_comp or p that is not a positive number.
    """

    m_mem: int = TOKEN_BUDGET
    token_budget: int | None = None
    m_comp: float | None = None
    p: float | None = None

    def __post_init__(self) -> None:
        for name in ("m_comp", "p"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {value}")


def make_policy(name: str, costs: Costs, corpus: Corpus, given: BatchLimits) -> Policy:
    """The policy called `name` for the corpus.

    Raises KeyError for an unknown name, ValueError for a sample that exceeds the memory limit or, where the paper's
    M_comp follows from it, the token budget.
    """
    p = costs.power.p if given.p is None else given.p
    m_comp, budget = given.m_comp, given.token_budget or given.m_mem
    if m_comp is None and name.startswith("dual_constraint"):
        tokens = corpus.tokens[corpus.counts > 0]
        if given.m_mem >= (most := int(tokens.max())) > budget:
            raise ValueError(
                f"the longest samples have {most:,} tokens, more than a token budget of {budget:,}, from which M_comp "
                f"follows: raise the budget to {most}, or give M_comp"
            )
        longest = limits.choose(costs.power, tokens, budget)
        m_comp = longest.m_comp / float(most) ** (longest.p - p)
    return policies.make(
        name,
        m_mem=given.m_mem,
        cost=costs.quadratic,
        token_budget=given.token_budget,
        m_comp=m_comp,
        p=p,
        quadratic=UNIT * costs.quadratic.b / costs.quadratic.c if costs.quadratic.c else float("inf"),
    )


def check(name: str, size: ModelSize, corpus: Corpus, given: BatchLimits, layout: Layout) -> None:
    """Refuse, before anything is measured, limits that no cost makes fit the corpus.

    Raises as `make_policy` and `Policy.checked_sizes`.
    """
    make_policy(name, flop_costs(size, corpus, ""), corpus, given).checked_sizes(corpus, layout)


def limits_line(policy: Policy, m_mem: int) -> str:
    """What bounds the batches, with the paper's M_comp where that is the rule."""
    told = f"M_mem {m_mem:,} tokens"
    if isinstance(policy, policies.DualConstraint):
        told += f", M_comp {policy.m_comp:.4g} tokens^p, p {policy.p:.3f}"
    return told


def find_costs(store: Store, device: str, size: ModelSize, adaln: str, corpus: Corpus) -> Costs:
    """`measured_costs` where `store` has them, else by FLOPs; `source` says which."""
    try:
        return measured_costs(store, device, size, adaln)
    except ValueError as error:
        return flop_costs(size, corpus, str(error))


def measured_costs(store: Store, device: str, size: ModelSize, adaln: str) -> Costs:
    """Costs measured on `device` (a slug). Raises ValueError where `store` has none of this model and AdaLN."""
    rows = store.rows("block_time", one_device(device), "full")
    if rows.empty:
        raise ValueError(f"no step times of {one_device(device)}")
    power = cast(PowerCost, measured_cost(rows, size.name, adaln, "power"))
    quadratic = cast(QuadraticCost, measured_cost(rows, size.name, adaln, "quadratic"))
    scaled = power.scaled(size.layers).extrapolating(), quadratic.scaled(size.layers).extrapolating()
    return Costs(*scaled, source=f"step times measured on {one_device(device)}")


def flop_costs(size: ModelSize, corpus: Corpus, reason: str) -> Costs:
    """Costs proportional to FLOPs of the blocks; the power is fitted to them over the corpus' lengths."""
    d, f = size.dim, size.ffn
    tokens = corpus.tokens[corpus.counts > 0].astype(np.float64)
    common: dict[str, Any] = {
        "layers": size.layers,
        "measured_layers": 1,
        "range": Range((1, int(tokens.max())), int(tokens.max())),
        "extrapolate": True,
        "source": "FLOPs",
    }
    scale = 4 / NOMINAL_FLOPS  # forward, backward of twice the size, recomputation
    quadratic = QuadraticCost(
        a=0.0,
        b=scale * UNIT * (12 * d * d + 4 * d * f + 4 * TEXT_TOKENS * d),
        c=scale * UNIT**2 * 4 * d,
        d=scale * 4 * d * d * TEXT_TOKENS,
        **common,
    )
    seconds = quadratic.seconds(1, tokens) / size.layers
    p = float(np.polyfit(np.log(tokens), np.log(seconds), 1)[0]) if np.unique(tokens).size > 1 else 1.0
    power = PowerCost(a=0.0, b=float(seconds.max() / (tokens.max() / UNIT) ** p), p=p, **common)
    return Costs(power, quadratic, f"FLOPs ({reason})")


def batch_table(policy: Policy, corpus: Corpus) -> list[str]:
    """The corpus' buckets with samples under `policy`, a line each."""
    used = np.flatnonzero(corpus.counts)
    sizes: npt.NDArray[np.int64] = policy.batch_sizes(corpus.tokens[used])
    return [
        f"  {corpus.shapes[k]!s:>12}  {corpus.tokens[k]:>7,} tokens  {corpus.counts[k]:>9,} samples  batch {b:,}"
        for k, b in zip(used, sizes, strict=True)
    ]


def tiny_corpus(samples: int) -> Corpus:
    """Images and clips of a few tokens, for trying things out on a CPU; equally many of each."""
    shapes = (Shape(1, 32, 32), Shape(1, 64, 64), Shape(5, 64, 64), Shape(9, 64, 96), Shape(17, 96, 96))
    tokens = np.array([Tokenizer().tokens(s) for s in shapes], dtype=np.int64)
    bucket_of = np.random.default_rng(0).permutation(np.arange(samples) % len(shapes)).astype(np.int32)
    return Corpus("tiny", "five small shapes, equally often", shapes, tokens, bucket_of)
