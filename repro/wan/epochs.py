"""Which samples come next: steps dealt epoch after epoch, and where they go on after a restart.

A run that goes on as it was deals exactly what the interrupted one would have. On another number of ranks, under
another policy or limit, the samples that the epoch has not used yet are dealt anew: each still appears once an epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from repro.balance.policies import Policy
from repro.balance.sampler import ScheduleSampler
from repro.balance.schedule import ABSENT, Layout, Schedule
from repro.balance.types import MicroBatch, Weighting
from repro.corpus.shapes import Corpus

Mask = npt.NDArray[np.bool_]


class ResumeError(ValueError):
    """The samples of an interrupted run are not those of this one."""


@dataclass(frozen=True)
class DealtStep:
    """A step as one rank takes it, and what all ranks do in it.

    micro_batches: this rank's M. batch, tokens: int64 [M, R], samples (0: a filler) and tokens of one sample.
    """

    epoch: int
    micro_batches: tuple[MicroBatch, ...]
    batch: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]


class Epochs:
    """Deals one rank's steps, endlessly; ranks agree without communication.

    position: epoch, and steps of its current schedule that were dealt.
    """

    def __init__(
        self, policy: Policy, corpus: Corpus, layout: Layout, rank: int, seed: int = 0, weighting: Weighting = "sample"
    ) -> None:
        self.policy, self.corpus, self.layout, self.rank = policy, corpus, layout, rank
        self.seed, self.weighting = seed, weighting
        self.epoch = 0
        self._begin(np.zeros(corpus.samples, dtype=bool))

    def _begin(self, used: Mask) -> None:
        """Deal what `used` leaves of the current epoch."""
        self._used_before, self._steps = used, 0
        self._ids = np.flatnonzero(~used)
        left = replace(self.corpus, bucket_of=self.corpus.bucket_of[self._ids]) if used.any() else self.corpus
        self.sampler = ScheduleSampler(self.policy, left, self.layout, self.rank, self.seed, self.weighting)
        self.sampler.set_epoch(self.epoch)

    def __iter__(self) -> Iterator[DealtStep]:
        """Steps from here on. A step counts as dealt once it is asked for."""
        while True:
            if self._steps == self.sampler.schedule.steps:
                self.epoch += 1
                self._begin(np.zeros(self.corpus.samples, dtype=bool))
            self._steps += 1
            yield self._dealt(self._steps - 1)

    def peek(self) -> tuple[MicroBatch, ...]:
        """This rank's micro-batches of the step to come, which stays undealt; none at the end of an epoch."""
        return self._dealt(self._steps).micro_batches if self._steps < self.sampler.schedule.steps else ()

    def _dealt(self, step: int) -> DealtStep:
        schedule = self.sampler.schedule
        slots = int(schedule.slots_of_step[step])
        own = tuple(
            replace(m, sample_ids=tuple(self._ids[list(m.sample_ids)].tolist()))
            for m in schedule.micro_batches(step, self.rank, self.weighting)
        )
        batch = schedule.batch[step, :slots].astype(np.int64)
        return DealtStep(self.epoch, own, batch, self.corpus.tokens[schedule.bucket[step, :slots]])

    def report(self) -> str:
        """The current epoch in one line."""
        return str(self.sampler.report())

    def settings(self) -> dict[str, Any]:
        """What decides the schedule besides samples and seed, for people to compare."""
        return {
            "policy": self.policy.name,
            "ranks": self.layout.ranks,
            "micro_batches": self.layout.micro_batches,
            "protocol": self.layout.protocol,
            "m_mem": self.layout.m_mem,
            "batch_sizes": dict(zip(map(str, self.corpus.shapes), self._batch_sizes(), strict=True)),
        }

    def _batch_sizes(self) -> list[int]:
        return [int(b) for b in self.policy.checked_sizes(self.corpus, self.layout)[0]]

    def state(self) -> dict[str, Any]:
        """Position and settings, as JSON; with `used`, everything that `resume` needs."""
        return {
            **self.sampler.state_dict(self._steps),
            "corpus": corpus_hash(self.corpus),
            "settings": self.settings(),
        }

    def used(self) -> npt.NDArray[np.uint8]:
        """Samples of this epoch used before its current schedule, and by now: uint8 [2, ceil(N / 8)], packed bits."""
        now = self._used_before.copy()
        now[self._ids[_dealt_ids(self.sampler.schedule, self._steps)]] = True
        return np.packbits(np.stack([self._used_before, now]), axis=1)

    def resume(self, state: dict[str, Any], used: npt.NDArray[np.uint8]) -> list[str]:
        """Go on from a `state`; returns what is different from the run that made it, a line each.

        Raises ResumeError where the corpus is another one.
        """
        check_corpus(self.corpus, state)
        before, now = np.unpackbits(used, axis=1, count=self.corpus.samples).astype(bool)
        self.seed, self.epoch = int(state["seed"]), int(state["epoch"])
        self._begin(before)
        try:
            self.sampler.load_state_dict({k: state[k] for k in ("seed", "epoch", "steps", "schedule")})
            self._steps = int(state["steps"])
        except ValueError:
            if now.all():
                self.epoch, now = self.epoch + 1, np.zeros_like(now)
            self._begin(now)
        else:
            return []
        here, then = self.settings(), state["settings"]
        changed = [f"{k}: {then.get(k)} -> {v}" for k, v in here.items() if k != "batch_sizes" and then.get(k) != v]
        if not changed:
            changed = ["the schedule is another one: batch sizes, cost or program changed"]
        left = int(self.sampler.corpus.samples)
        return [*changed, f"the {left:,} samples left of epoch {self.epoch} are dealt anew"]


def check_corpus(corpus: Corpus, state: dict[str, Any]) -> None:
    """Raise ResumeError where a `state` of `Epochs` is of another corpus."""
    here = corpus_hash(corpus)
    if state["corpus"] != here:
        raise ResumeError(
            f"the interrupted run's samples are another corpus ({state['corpus']}, here {here}): give the same "
            "--corpus or --data and --samples, or start anew in another folder"
        )


def corpus_hash(corpus: Corpus) -> str:
    """Sixteen hex digits that tell corpora apart by shapes, and the shape of every sample."""
    digest = hashlib.sha256(repr([str(s) for s in corpus.shapes]).encode())
    digest.update(np.ascontiguousarray(corpus.bucket_of).tobytes())
    return digest.hexdigest()[:16]


def _dealt_ids(schedule: Schedule, steps: int) -> npt.NDArray[np.int64]:
    """Ids dealt in the first `steps` steps: of each bucket the first ones of its part of `order`."""
    bucket, batch = schedule.bucket[:steps], schedule.batch[:steps]
    present = bucket != ABSENT
    number = np.bincount(bucket[present], weights=batch[present], minlength=schedule.buckets).astype(np.int64)
    offset = np.concatenate([[0], np.cumsum(schedule.corpus.counts)])
    return np.concatenate([schedule.order[o : o + n] for o, n in zip(offset[:-1], number, strict=True)])
