"""The training loop: deal a step, take it, log it, save now and then; and where to go on after an interruption."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from repro.balance.models import TEXT_TOKENS, ModelSize
from repro.balance.types import MicroBatch
from repro.wan.checkpointing import Checkpoints
from repro.wan.engine import Engine
from repro.wan.epochs import DealtStep, Epochs, check_corpus
from repro.wan.log import LoggedStep, StepFlops
from repro.wan.parallel import Checkpointing

_REACH = {"seed": ", for noise and made-up samples; the samples' order and the weights go on as they were"}
"""Of an option that a resumed run has changed: what does not follow it."""


@dataclass(frozen=True)
class Length:
    """How long a run is, in optimizer steps. save_every: between checkpoints; the last step has one too. 0: none."""

    steps: int
    save_every: int = 500

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("save_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


class StepLog(Protocol):
    """Is told of every step; `repro.wan.log.RunLog` for people."""

    def step(self, logged: LoggedStep) -> None:
        """One more step is done."""
        ...


class StopSignals:
    """Ctrl-C, and SIGTERM and SIGUSR1, with which schedulers announce the end: inside `with` they end a run in order.

    asked: the first signal's name, None before. A second one acts as it would have. told: what is said on stderr when
    the first one comes, since the step under way may outlast the patience of who sent it.
    """

    def __init__(self, told: str = "") -> None:
        self.asked: str | None = None
        self._told = told
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:  # as of a shell's background jobs
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, _frame: object) -> None:
        self.asked = signal.Signals(number).name
        self.__exit__()
        if self._told:  # past Python's buffers, which the interrupted code may be writing to
            os.write(2, f"{self.asked}: {self._told}\n".encode())


class Trainer:
    """Everything a run consists of, on one rank.

    size: for counting FLOPs. about: the model's description, which a checkpoint must match to be resumed. options: what
    else a run is made with; a resumed run says where it differs. expect: told which micro-batches come next.
    """

    def __init__(
        self,
        engine: Engine,
        epochs: Epochs,
        checkpoints: Checkpoints,
        size: ModelSize,
        about: Mapping[str, Any],
        length: Length,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.engine, self.epochs, self.checkpoints = engine, epochs, checkpoints
        self.size, self.about, self.length, self.options = size, dict(about), length, dict(options or {})
        self.expect: Callable[[Sequence[MicroBatch]], None] = lambda _: None
        self.step = 0
        self._unlogged: OSError | None = None

    def resume(self) -> list[str]:
        """Go on from the newest checkpoint, where there is one; returns what people should know, a line each.

        Raises CheckpointError, and ResumeError for another corpus.
        """
        path = self.checkpoints.newest()
        if path is None:
            return []
        about = self.checkpoints.read_about(path, self.about)
        # The corpus is checked before anything is loaded: its size is that of the mask of used samples.
        check_corpus(self.epochs.corpus, about["sampler"])
        width = -(-self.epochs.corpus.samples // 8)
        used = self.checkpoints.load(path, self.engine.model, self.engine.optimizer, width)
        self.step = int(about["step"])
        then = about["options"]
        changed = [f"{k}: {then.get(k)} -> {v}{_REACH.get(k, '')}" for k, v in self.options.items() if then.get(k) != v]
        dealt = self.epochs.resume(about["sampler"], used)
        return [f"resumed from {path} after {self.step} steps", *changed, *dealt]

    def run(self, log: StepLog | None, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train until `length.steps`, or until `stop` is true on some rank: then the step is finished and saved.

        log: on the first rank. Returns whether it was stopped. Raises NonFiniteLoss; a checkpoint that is being written
        is completed first, whatever ends the run. A log that cannot be written stops all ranks as `stop` does; the
        first rank then raises its OSError.
        """
        try:
            stopped = self._loop(log, stop)
        except BaseException:
            with contextlib.suppress(Exception):  # what ended the run is what its user must read
                self.checkpoints.wait(alone=True)
            raise
        self.checkpoints.wait()
        if self._unlogged is not None:
            raise self._unlogged
        return stopped

    def _loop(self, log: StepLog | None, stop: Callable[[], bool]) -> bool:
        began = time.perf_counter()
        stopped = False
        for dealt in itertools.islice(self.epochs, max(0, self.length.steps - self.step)):
            self.expect((*dealt.micro_batches, *self.epochs.peek()))
            tokens = dealt.tokens[:, self.engine.world.rank].tolist()
            flops = step_flops(self.size, dealt, self.engine.parallelism.checkpointing)
            ends = partial(self._ends, stop)
            result = self.engine.step(self.step, dealt.micro_batches, tokens, dealt.epoch, ends)
            now = time.perf_counter()
            if log is not None:
                self._log(log, LoggedStep(self.step, dealt.epoch, now - began, flops, result))
            began = now
            self.step += 1
            every, last = self.length.save_every, result.stop or self.step == self.length.steps
            if every and (last or self.step % every == 0):
                self.save()
            if result.stop:
                stopped = self.step < self.length.steps
                break
        return stopped

    def _log(self, log: StepLog, logged: LoggedStep) -> None:
        """Other ranks are on their way into the next step: they learn at its end that the log cannot be written."""
        try:
            log.step(logged)
            self._unlogged = None
        except OSError as error:
            self._unlogged = error

    def _ends(self, stop: Callable[[], bool]) -> bool:
        return self._unlogged is not None or stop()

    def save(self) -> None:
        """Start to save the run as it stands."""
        about = {"model": self.about, "options": self.options, "sampler": self.epochs.state()}
        self.checkpoints.save(self.step, self.engine.model, self.engine.optimizer, about, self.epochs.used())


def step_flops(size: ModelSize, dealt: DealtStep, checkpointing: Checkpointing) -> StepFlops:
    """FLOPs of a step's samples on all ranks, of the blocks' linears and attention.

    Full checkpointing runs every forward pass twice, selective all of it but scores and weighted sums.
    """
    batch, tokens = dealt.batch.astype(np.float64), dealt.tokens.astype(np.float64)
    forward = size.layers * float(np.sum(size.forward_flops(batch, tokens)))
    attention = size.layers * float(np.sum(4 * batch * tokens * (tokens + TEXT_TOKENS) * size.dim))
    again = {"none": 0.0, "selective": forward - attention, "full": forward}[checkpointing]
    return StepFlops(3 * forward, 3 * forward + again)
