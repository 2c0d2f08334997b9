"""A batch sampler for `torch.utils.data.DataLoader` that deals a policy's schedule, without PyTorch and communication.

Every rank computes the whole schedule from seed and epoch and deals its own part, so ranks agree as long as they run
the same code on the same corpus; `EpochReport.fingerprint` is there to be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from repro.balance.policies import Policy
from repro.balance.schedule import Layout, Schedule
from repro.balance.types import MicroBatch, Weighting
from repro.corpus.shapes import Corpus

Item = TypeVar("Item")


@dataclass(frozen=True)
class EpochReport:
    """What an epoch will be, known before it starts.

    samples: dealt, each exactly once; none left out, none twice. steps: optimizer steps.
    micro_batches: of each rank. partial: micro-batches with fewer samples than their bucket's batch size. fillers:
    micro-batches of weight 0 over all ranks, in the last step. samples_per_step: least, mean and most. max_wait_steps,
    wait_limit_steps, backlog_steps: as in `Schedule`. fingerprint: of the schedule; ranks with the same deal the same.
    """

    samples: int
    steps: int
    micro_batches: int
    partial: int
    fillers: int
    samples_per_step: tuple[int, float, int]
    max_wait_steps: int
    wait_limit_steps: int
    backlog_steps: float
    fingerprint: str

    def __str__(self) -> str:
        least, mean, most = self.samples_per_step
        return (
            f"{self.samples:,} samples in {self.steps:,} steps of {mean:.1f} samples ({least} to {most}), "
            f"{self.micro_batches:,} micro-batches a rank; {self.partial} partial, {self.fillers} fillers; "
            f"longest wait {self.max_wait_steps} steps (limit {self.wait_limit_steps}), "
            f"backlog {self.backlog_steps:.2f} steps; schedule {self.fingerprint}"
        )


@dataclass(eq=False)
class _Iteration:
    """One iteration over an epoch. steps: of the epoch, dealt in whole. ended: it deals no more."""

    steps: int
    ended: bool = False


class ScheduleSampler:
    """Deals one rank's micro-batches as lists of sample ids; iterate once for each epoch, after `set_epoch`.

    Ids count the corpus' samples, not the records of the file that it came from (`Manifest.record_of`).

    Pass it as `batch_sampler` to a DataLoader, and take the weights from `micro_batches()`, which runs alongside:

        for batch, micro_batch in zip(loader, sampler.micro_batches()):
            loss = ranks * sum(weight * loss_of_sample)    # the engine averages gradients over ranks

    Each step has `schedule.slots_of_step[step]` micro-batches, the same number on every rank.
    Raises ValueError for a rank outside the layout; the schedule's own errors come with first use.
    """

    def __init__(
        self, policy: Policy, corpus: Corpus, layout: Layout, rank: int, seed: int = 0, weighting: Weighting = "sample"
    ) -> None:
        if not isinstance(rank, int | np.integer) or not 0 <= rank < layout.ranks:
            raise ValueError(f"rank must be in 0..{layout.ranks - 1}, got {rank}")
        self.policy, self.corpus, self.layout, self.rank = policy, corpus, layout, rank
        self.seed, self.weighting = seed, weighting
        self.epoch = 0
        self._first_step = 0  # where the next iteration starts
        self._iterations: list[_Iteration] = []  # those under way, and those that ended after the newest began
        self._schedule: Schedule | None = None

    @property
    def schedule(self) -> Schedule:
        """The current epoch's schedule, computed on first use."""
        if self._schedule is None:
            self._schedule = self.policy.schedule(self.corpus, self.layout, self.seed, self.epoch)
        return self._schedule

    def report(self) -> EpochReport:
        """What the current epoch fills, cuts short and delays."""
        schedule = self.schedule
        sizes, _ = self.policy.checked_sizes(self.corpus, self.layout)
        per_step = schedule.samples_of_step
        return EpochReport(
            samples=int(per_step.sum()),
            steps=schedule.steps,
            micro_batches=int(schedule.slots_of_step.sum()),
            partial=int(np.count_nonzero((schedule.batch > 0) & (schedule.batch < sizes[schedule.bucket]))),
            fillers=schedule.fillers,
            samples_per_step=(int(per_step.min()), float(per_step.mean()), int(per_step.max())),
            max_wait_steps=schedule.max_wait_steps,
            wait_limit_steps=schedule.wait_limit_steps,
            backlog_steps=schedule.backlog_steps,
            fingerprint=fingerprint(schedule),
        )

    def __len__(self) -> int:
        """Micro-batches that the next iteration deals: the epoch's, or after a resume what is left of it."""
        return int(self.schedule.slots_of_step[self._first_step :].sum())

    def steps(self) -> Iterator[tuple[MicroBatch, ...]]:
        """This rank's micro-batches step by step, from where the next iteration starts."""
        return self._counted((own, step + 1) for step, own in self._left())

    def micro_batches(self) -> Iterator[MicroBatch]:
        """This rank's micro-batches in the order of iteration; a filler repeats one sample at weight 0."""
        return self._counted(
            (micro_batch, step + (slot == len(own)))
            for step, own in self._left()
            for slot, micro_batch in enumerate(own, 1)
        )

    def __iter__(self) -> Iterator[list[int]]:
        for micro_batch in self.micro_batches():
            yield list(micro_batch.sample_ids)
        self._first_step = 0

    def __getstate__(self) -> dict[str, object]:
        """Iterations under way stay with the original; a copy begins where its next one would."""
        return {**self.__dict__, "_iterations": []}

    def _left(self) -> Iterator[tuple[int, tuple[MicroBatch, ...]]]:
        """(step, this rank's micro-batches) from where the next iteration starts."""
        steps = range(self._first_step, self.schedule.steps)
        return ((step, self.schedule.micro_batches(step, self.rank, self.weighting)) for step in steps)

    def _counted(self, dealt: Iterable[tuple[Item, int]]) -> Iterator[Item]:
        """The items of (item, whole steps of the epoch dealt with it), noted for `state_dict`.

        Each iteration has a count of its own, so that two side by side, or one after the other, do not add up.
        """
        own = _Iteration(self._first_step)  # begins with the first item that is asked for
        self._iterations = [i for i in self._iterations if not i.ended] + [own]
        try:
            for item, own.steps in dealt:
                yield item
        finally:
            own.ended = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Another than the current one starts at its first step; the current one where it stands."""
        if epoch != self.epoch:
            self.epoch, self._schedule = epoch, None
            self._first_step, self._iterations = 0, []

    def state_dict(self, steps: int | None = None) -> dict[str, int | str]:
        """Where the epoch stands.

        steps: optimizer steps of it that are done, those before a resume included; None for those dealt in whole so
        far, by whichever of `__iter__`, `steps` and `micro_batches` is iterated. That is ahead of training where a
        DataLoader's workers prefetch.

        Raises ValueError for more than the epoch has, and for None where iterations side by side do not stand at the
        same step: one prefetches, or was only looked into.
        """
        if steps is None:
            dealt = {i.steps for i in self._iterations} or {self._first_step}
            if len(dealt) > 1:
                raise ValueError(
                    f"iterations side by side have dealt {' and '.join(map(str, sorted(dealt)))} steps (a DataLoader's "
                    "workers prefetch, or one that was left is still held): say how many are done, "
                    "state_dict(steps=...)"
                )
            (steps,) = dealt
        if not 0 <= steps <= self.schedule.steps:
            raise ValueError(f"steps must be in 0..{self.schedule.steps}, got {steps}")
        return {"seed": self.seed, "epoch": self.epoch, "steps": steps, "schedule": fingerprint(self.schedule)}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Go on after the steps of a `state_dict`, exactly as the run that made it would have.

        Raises ValueError, and stays as it was, where corpus, policy, layout or code differ, so that the schedule would
        be another one, and for a state that is incomplete or has more steps than the epoch.
        """
        seed, epoch, steps = (_whole(state, name) for name in ("seed", "epoch", "steps"))
        schedule = self.policy.schedule(self.corpus, self.layout, seed, epoch)
        here = fingerprint(schedule)
        if here != state.get("schedule"):
            raise ValueError(
                f"state is of schedule {state.get('schedule')}, here it is {here}: resume with the same corpus, "
                "policy and layout, or start a new epoch"
            )
        if not 0 <= steps <= schedule.steps:
            raise ValueError(f"steps of the state must be in 0..{schedule.steps}, got {steps}")
        self.seed, self.epoch, self._schedule = seed, epoch, schedule
        self._first_step, self._iterations = steps, []


def _whole(state: Mapping[str, object], name: str) -> int:
    value = state.get(name)
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise ValueError(f"{name} of the state must be a whole number, got {value!r}")
    return int(value)


def fingerprint(schedule: Schedule) -> str:
    """Sixteen hex digits that tell schedules apart, the shapes and tokens of their buckets included."""
    corpus = schedule.corpus
    digest = hashlib.sha256(" ".join(map(str, corpus.shapes)).encode())
    for array in (corpus.tokens, schedule.bucket, schedule.batch, schedule.order):
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]
