"""The compute limit and the target step time, chosen from the buckets, the memory limit and a fitted cost alone.

The rule of AdaptiveLoad (arXiv 2605.17923), B = max(1, min(floor(M_mem / S), floor(M_comp / S^p))), needs an M_comp;
the paper leaves open how it is found. Here the longest bucket sets it. Its samples cannot be split, so every step that
meets it lasts at least that long; it is filled up to the memory limit, and no other bucket may cost more. A lower
M_comp would shrink the others' batches without making those steps shorter, a higher one would let them outlast it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from repro.balance.cost import PowerCost
from repro.balance.types import Cost


@dataclass(frozen=True)
class Limits:
    """What the rule needs, and what follows.

    m_mem: tokens. m_comp: tokens^p. p: exponent. target_seconds: predicted step time of the longest bucket's
    micro-batch, which no other one is meant to exceed.
    """

    m_mem: int
    m_comp: float
    p: float
    target_seconds: float


def choose(cost: PowerCost, tokens: npt.ArrayLike, m_mem: int) -> Limits:
    """Limits for buckets of `tokens` [K] under the memory limit; `cost` gives p and the target.

    Raises ValueError where the longest bucket exceeds m_mem, TypeError for a cost of another form.
    """
    if not isinstance(cost, PowerCost):
        form = type(cost).__name__
        raise TypeError(f"cost must be of the power form, measured_cost(rows, model, adaln, 'power'), got {form}")
    longest, batch = _longest(tokens, m_mem)
    return Limits(m_mem, batch * float(longest) ** cost.p, cost.p, float(cost.seconds(batch, longest)))


def target_seconds(cost: Cost, tokens: npt.ArrayLike, m_mem: int) -> float:
    """The same target for a cost of any form: step time of the longest bucket, filled up to the memory limit."""
    longest, batch = _longest(tokens, m_mem)
    return float(cost.seconds(batch, longest))


def _longest(tokens: npt.ArrayLike, m_mem: int) -> tuple[int, int]:
    """Tokens and batch size of the longest bucket."""
    lengths = np.asarray(tokens, np.int64)
    if lengths.size == 0 or lengths.min() < 1:
        raise ValueError(f"tokens must hold at least one bucket and be positive, got {lengths.tolist()}")
    longest = int(lengths.max())
    if longest > m_mem:
        raise ValueError(f"the longest bucket has {longest:,} tokens, more than the memory limit of {m_mem:,}: drop it")
    return longest, m_mem // longest
