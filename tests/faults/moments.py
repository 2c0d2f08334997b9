"""A command that is ended at a random moment, again and again: what it had recorded stands, and the next run goes on.

A moment is drawn by seed. It is either before the n-th line that runs of our code or of PyTorch's that writes
checkpoints, counted over all threads, so that a test comes back to it; or a share of the time that an undisturbed run
takes. Processes are forked from a server that has everything loaded: only the interpreter's start is left out.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, Protocol

ROOT = Path(__file__).resolve().parents[2]
WRITERS = re.compile(rf"{re.escape(str(ROOT / 'repro'))}/(?!balance|corpus)|/torch/distributed/checkpoint/filesystem")
"""Files whose lines count: ours, but for those that plan and write nothing, and PyTorch's that writes checkpoints."""
SECONDS = 300
"""For any one process, on a busy machine."""
context = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.faults.moments_all", "tests.faults.moments_train", "tests.faults.lost_ranks"]
By = Literal["lines", "clock"]


class Lost(AssertionError):
    """Something that was recorded is gone or damaged, or the next run did not go on."""


@dataclass(frozen=True)
class Ended:
    """How a process ended. lines: that ran in it, where they were counted."""

    code: int
    said: str
    lines: int
    seconds: float


@dataclass(frozen=True)
class Moment:
    """When to send which signal: at that share of what an undisturbed run takes."""

    command: str
    signal: signal.Signals
    seed: int
    by: By = "lines"

    @property
    def share(self) -> float:
        """In (0, 1]."""
        return 1 - random.Random(f"{self.command} {self.signal.name} {self.seed}").random()


class Subject(Protocol):
    """A command in a folder of its own, which `Chain` ends and starts again."""

    name: str

    def __init__(self, folder: Path) -> None: ...

    def run(self) -> None:
        """In a process of its own: the command, whose exit ends the process."""
        ...

    def check(self, ended: Ended, sent: signal.Signals | None) -> str:
        """What stands after a run, in a few words. sent: the signal, None where it came to its end. Raises Lost."""
        ...

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to record."""
        ...


def start(work: Callable[[], None], folder: Path, sent: int = 0, at: int = 0) -> Any:
    """A process that does `work`, with its output in `folder`; it sends itself `sent` at its line number `at`."""
    child = context.Process(target=_child, args=(work, folder, sent, at))
    child.start()
    return child


def finish(child: Any, folder: Path, began: float = 0.0) -> Ended:
    """Wait for a process of `start`, which began at that `time.monotonic()`."""
    child.join(SECONDS)
    if child.exitcode is None:
        child.kill()
        raise Lost(f"still running after {SECONDS} s: {(folder / 'said.txt').read_text()[-500:]}")
    counted = folder / "lines.txt"
    lines = int(counted.read_text()) if counted.exists() else 0
    return Ended(child.exitcode, (folder / "said.txt").read_text(), lines, time.monotonic() - began)


def _child(work: Callable[[], None], folder: Path, sent: int, at: int) -> None:
    with (folder / "said.txt").open("wb") as said:
        os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    with _counting(folder / "lines.txt", sent, at) if at else contextlib.nullcontext():
        work()


@contextlib.contextmanager
def _counting(path: Path, sent: int, at: int) -> Iterator[None]:
    count, process = 0, os.getpid()
    counts: dict[str, bool] = {}

    def line(_frame: FrameType, what: str, _argument: object) -> Any:
        nonlocal count
        count += what == "line"
        if count == at:
            os.kill(process, sent)
        return line

    def call(frame: FrameType, _what: str, _argument: object) -> Any:
        name = frame.f_code.co_filename
        if name not in counts:
            counts[name] = WRITERS.search(name) is not None
        return line if counts[name] else None

    path.unlink(missing_ok=True)
    threading.settrace(call)
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        path.write_text(str(count))


class Chain:
    """A subject that is ended at one moment after the other, in the state in which the last one left it.

    make: a fresh subject. It is begun anew once nothing is left to record.
    """

    def __init__(self, make: Callable[[Path], Subject], folder: Path) -> None:
        self._make, self._folder, self._number = make, folder, 0
        self.lines = self._undisturbed(at=sys.maxsize).lines

    def _undisturbed(self, at: int = 0) -> Ended:
        self.begin_anew()
        whole = self._run(at)
        if whole.code:
            raise Lost(f"undisturbed, {self._subject.name} ended with {whole.code}: {whole.said[-500:]}")
        self._subject.check(whole, None)
        self.begin_anew()
        return whole

    @functools.cached_property
    def seconds(self) -> float:
        """That an undisturbed run takes here."""
        return self._undisturbed().seconds

    def begin_anew(self) -> None:
        """Go on with a fresh subject."""
        self._number += 1
        self._place.mkdir(parents=True)
        self._subject = self._make(self._place)

    @property
    def _place(self) -> Path:
        return self._folder / str(self._number)

    def _run(self, at: int = 0, sent: int = 0) -> Ended:
        began = time.monotonic()
        return finish(start(self._subject.run, self._place, sent, at), self._place, began)

    def end_at(self, moment: Moment) -> tuple[str, str]:
        """Run, end it at the moment, and check; the moment and what came of it, in words. Raises Lost."""
        for _ in range(2):  # a run that goes on has less to do, and may be done before its moment
            told, ended = self._end_at(moment)
            struck = ended.code != 0 or moment.signal.name in ended.said
            outcome = self._subject.check(ended, moment.signal if struck else None)
            if moment.signal is signal.SIGKILL and ended.code not in (0, -signal.SIGKILL):
                raise Lost(f"ended by itself with {ended.code}: {ended.said[-500:]}")
            if struck:
                break
            self.begin_anew()
        if self._subject.complete:
            self.begin_anew()
        return told, outcome

    def _end_at(self, moment: Moment) -> tuple[str, Ended]:
        if moment.by == "lines":
            at = max(1, round(moment.share * self.lines))
            return f"line {at} of {self.lines}", self._run(at, moment.signal)
        seconds, began = moment.share * self.seconds, time.monotonic()
        child = start(self._subject.run, self._place)
        child.join(seconds)
        if child.exitcode is None:
            os.kill(child.pid, moment.signal)
        return f"{seconds:.2f} s of {self.seconds:.2f} s", finish(child, self._place, began)

    def complete(self) -> None:
        """Let it come to its end, and check. Raises Lost."""
        ended = self._run()
        outcome = self._subject.check(ended, None)
        if ended.code or not self._subject.complete:
            raise Lost(f"the next run did not come to its end: {outcome}, {ended.said[-500:]}")
