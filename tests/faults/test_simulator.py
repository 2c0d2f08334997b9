"""The simulator against a discrete-event simulation that shares no line with it.

Here every rank is a process with a clock of its own that computes its micro-batches one after the other, and a network
that carries one collective at a time. Events are taken from a queue in the order of their time; nothing is summed or
maximised over arrays.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from repro.balance.balanced import Balanced
from repro.balance.cost import reference_wan14b
from repro.balance.policies import EqualToken, LongestFirst, Policy
from repro.balance.schedule import Layout, Schedule
from repro.balance.simulate import Communication, simulate
from repro.balance.types import Step
from repro.corpus.shapes import Corpus, Shape, Tokenizer

M_MEM = 40_000
SHAPES = (Shape(1, 256, 256), Shape(17, 256, 256), Shape(33, 480, 832), Shape(81, 480, 832))
TOKENS = [((s.frames - 1) // 4 + 1) * (s.height // 16) * (s.width // 16) for s in SHAPES]
POLICIES: list[Policy] = [
    EqualToken(M_MEM),
    LongestFirst(M_MEM, reference_wan14b()),
    Balanced(M_MEM, reference_wan14b()),
]


def formula(samples: int, shape: Shape) -> float:
    """Seconds of a micro-batch: (40 / 3) (5.7 + 127.6 B S / 10^4 + 47.75 B S^2 / 10^8) ms."""
    s = TOKENS[SHAPES.index(shape)] / 1e4
    return 40 / 3 * (5.7 + 127.6 * samples * s + 47.75 * samples * s * s) * 1e-3


@dataclass
class Cluster:
    """Ranks and a network that work through steps.

    collective: seconds of the collectives between two meetings. hidden: whether they run beside the computation of
    their own stretch (they start with it), or after it (they start when the last rank has come). worked, waited: of
    every rank, seconds computed and seconds at meetings while others computed.
    """

    ranks: int
    meet: Literal["step", "micro_batch"]
    collective: float
    hidden: bool
    clock: float = 0.0
    worked: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worked, self.waited = [0.0] * self.ranks, [0.0] * self.ranks

    def step(self, step: Step) -> float:
        """Work through a step; returns how long it took."""
        began = self.clock
        queues = [deque(formula(len(m.sample_ids), m.shape) for m in rank) for rank in step.ranks]
        while any(queues):
            together = 1 if self.meet == "micro_batch" else len(queues[0])
            self._stretch([[q.popleft() for _ in range(together)] for q in queues])
        return self.clock - began

    def _stretch(self, work: list[list[float]]) -> None:
        """From one meeting to the next: every rank its micro-batches, and the collectives."""
        begins = self.clock
        events = [(begins + seconds[0], rank, 0) for rank, seconds in enumerate(work)]
        heapq.heapify(events)
        arrived: dict[int, float] = {}
        while events:
            now, rank, done = heapq.heappop(events)
            if done + 1 < len(work[rank]):
                heapq.heappush(events, (now + work[rank][done + 1], rank, done + 1))
            else:
                arrived[rank] = now
        last = now  # events come in order, so the last one is the slowest rank's
        for rank, at in arrived.items():
            self.worked[rank] += at - begins
            self.waited[rank] += last - at
        network = (begins if self.hidden else last) + self.collective
        self.clock = network if network > last else last


def corpus(counts: list[int], seed: int) -> Corpus:
    buckets = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(SHAPES)), counts)).astype(np.int32)
    return Corpus("random", "test", SHAPES, np.array(TOKENS), buckets)


def both(
    policy: Policy, samples: Corpus, layout: Layout, seconds: tuple[float, float] | None, hidden: bool
) -> tuple[Schedule, Cluster, list[float], Communication | None]:
    """The schedule, the cluster after it has worked through it, its steps, and what `simulate` is told.

    seconds: of gathering all parameters and of reducing all gradients on a ring without end; None for no network.
    """
    schedule = policy.schedule(samples, layout, seed=1)
    collective, told = 0.0, None
    if seconds is not None:
        gather, reduce = seconds
        times = 2 if layout.sync == "micro_batch" else 1
        collective = (times * gather + reduce) * (layout.ranks - 1) / layout.ranks
        told = Communication(gather * 1e9, reduce * 2e9, 1e9, 2e9, overlap=1.0 if hidden else 0.0)
    cluster = Cluster(layout.ranks, layout.sync, collective, hidden)
    return schedule, cluster, [cluster.step(step) for step in schedule], told


@given(
    policy=st.sampled_from(POLICIES),
    counts=st.lists(st.integers(0, 40), min_size=4, max_size=4).filter(any),
    ranks=st.sampled_from([1, 2, 3, 8]),
    micro_batches=st.integers(1, 4),
    sync=st.sampled_from(["step", "micro_batch"]),
    seconds=st.none() | st.tuples(st.floats(0, 30), st.floats(0, 30)),
    hidden=st.booleans(),
    seed=st.integers(0, 9),
)
@settings(derandomize=True, max_examples=120, deadline=None)
def test_the_simulator_agrees_with_discrete_events(
    policy: Policy,
    counts: list[int],
    ranks: int,
    micro_batches: int,
    sync: Literal["step", "micro_batch"],
    seconds: tuple[float, float] | None,
    hidden: bool,
    seed: int,
) -> None:
    samples = corpus(counts, seed)
    layout = Layout(ranks, M_MEM, micro_batches, sync)
    schedule, cluster, steps, told = both(policy, samples, layout, seconds, hidden)
    found = simulate(schedule, reference_wan14b(), layout, told)
    # double precision, sums in another order
    np.testing.assert_allclose(found.step_seconds, steps, rtol=1e-9)
    assert found.samples_per_s == pytest.approx(sum(counts) / cluster.clock, rel=1e-9)
    tokens = sum(c * t for c, t in zip(counts, TOKENS, strict=True))
    assert found.tokens_per_s == pytest.approx(tokens / cluster.clock, rel=1e-9)
    assert found.bubble == pytest.approx(sum(cluster.waited) / sum(cluster.worked), rel=1e-9, abs=1e-9)
    mean = sum(steps) / len(steps)
    spread = (sum((s - mean) ** 2 for s in steps) / len(steps)) ** 0.5
    assert found.step_cv == pytest.approx(spread / mean, rel=1e-6, abs=1e-9)
    ideal = sum(c / (M_MEM // t) * formula(M_MEM // t, s) for c, t, s in zip(counts, TOKENS, SHAPES, strict=True))
    assert found.share_of_perfect == pytest.approx(min(1.0, ideal / (ranks * cluster.clock)), rel=1e-9)


def test_tokens_and_formula_are_those_of_the_package() -> None:
    assert [Tokenizer().tokens(s) for s in SHAPES] == TOKENS
    for tokens, shape in zip(TOKENS, SHAPES, strict=True):
        for samples in (1, M_MEM // tokens):
            assert float(reference_wan14b().seconds(samples, tokens)) == pytest.approx(
                formula(samples, shape), rel=1e-12
            )


def test_the_reference_simulates_what_can_be_done_by_hand() -> None:
    """Two ranks, 2 s and 3 s of work, then 4 s and 1 s; a collective of 1 s."""
    for meet, hidden, seconds in (
        ("micro_batch", False, 3 + 1 + 4 + 1),
        ("micro_batch", True, 3 + 4),
        ("step", False, 6 + 1),
        ("step", True, 6),
    ):
        cluster = Cluster(2, meet, 1.0, hidden)  # type: ignore[arg-type]
        for stretch in [[[2.0], [3.0]], [[4.0], [1.0]]] if meet == "micro_batch" else [[[2.0, 4.0], [3.0, 1.0]]]:
            cluster._stretch(stretch)
        assert cluster.clock == seconds
        assert cluster.worked == [6.0, 4.0]
        assert cluster.waited == ([1.0, 3.0] if meet == "micro_batch" else [0.0, 2.0])
