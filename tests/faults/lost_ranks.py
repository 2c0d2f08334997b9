"""One of two ranks of `python -m repro.train` that dies, hangs, or cannot go on, for `test_ranks`."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from repro import train
from repro.records import files
from repro.wan import lost
from repro.wan.log import StepCsv
from repro.wan.samples import FlowLosses
from tests.faults import moments, moments_train

FAULT_AT = 3
"""Micro-batch, and step, of its own process at which a rank is struck: the first step is saved by then."""


@dataclass(frozen=True)
class Rank:
    """What a process of its own does. fault: name of a function below; it strikes the rank that it is meant for."""

    out: Path
    rank: int
    port: int
    fault: str
    options: tuple[str, ...]

    def __call__(self) -> None:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ.update(where, RANK=str(self.rank), LOCAL_RANK=str(self.rank))
        torch.set_num_threads(1)
        lost.LAST_WORD_SECONDS = 1.0
        if self.fault:
            globals()[self.fault](self.rank, self.out)
        made = ("--out", str(self.out), "--results", str(self.out / "none"))
        sys.argv = ["repro.train", *moments_train.OPTIONS, *made, *self.options]
        train.app()


def _strike(what: Any) -> None:
    losses, calls = FlowLosses.__call__, 0

    def struck(self: FlowLosses, *arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == FAULT_AT:
            what()
        return losses(self, *arguments)

    FlowLosses.__call__ = struck  # type: ignore[method-assign]


def dies(rank: int, _out: Path) -> None:
    """As the kernel does where the machine runs out of memory."""
    if rank == 1:
        _strike(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs(rank: int, _out: Path) -> None:
    """Neither computes nor answers."""
    if rank == 1:
        _strike(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def runs_out_of_memory(rank: int, _out: Path) -> None:
    """Asks for more than any machine has."""
    if rank == 1:
        _strike(lambda: torch.empty(1 << 50))


def cannot_log(rank: int, _out: Path) -> None:
    """The first rank alone writes the log."""
    append, steps = StepCsv.append, 0

    def full(self: StepCsv, *arguments: Any) -> None:
        nonlocal steps
        steps += 1
        if steps >= FAULT_AT:
            raise files.WriteError(f"{self.path} could not be written: {os.strerror(errno.ENOSPC)}")
        append(self, *arguments)

    StepCsv.append = full  # type: ignore[method-assign]


def has_a_full_disk(rank: int, _out: Path) -> None:
    """No file of the first rank grows past a kilobyte any more."""
    if rank == 0:
        _strike(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY)))


def cannot_calibrate(rank: int, _out: Path) -> None:
    """The first rank alone writes down what was measured."""
    replace = files.replace

    def full(path: Path, content: bytes) -> None:
        if path.name == "calibration.csv":
            raise files.WriteError(f"{path} could not be written: {os.strerror(errno.ENOSPC)}")
        replace(path, content)

    files.replace = full


def in_a_long_step(subject: moments_train.Train) -> None:
    """Alone: told to end while a checkpoint is being written, and killed, as torchrun does, before the step is done."""

    def lasts() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        latest, deadline = subject.out / "checkpoints" / "latest", time.monotonic() + moments.SECONDS
        while not latest.exists() and time.monotonic() < deadline:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGKILL)

    _strike(lasts)
    subject.run()
