"""`python -m repro.train` with a tiny model, for `moments`: what comes of it is known from an undisturbed run."""

from __future__ import annotations

import csv
import re
import signal
import sys
from pathlib import Path

import fsspec  # noqa: F401 - these four are imported in passing, by every process, unless they are there
import torch._dynamo
import torch._inductor
import torch.onnx  # noqa: F401

from repro import train
from repro.wan import checkpoint_index
from tests.faults.moments import Ended, Lost

STEPS, EVERY = 5, 2
OPTIONS = (
    *("--model", "tiny", "--layers", "1", "--corpus", "tiny", "--samples", "30", "--m-mem", "180", "--device", "cpu"),
    *("--mode", "baseline", "--protocol", "as_published", "--checkpointing", "none"),
    *("--steps", str(STEPS), "--save-every", str(EVERY)),
)


class Train:
    """The command in a folder of its own."""

    name = "repro.train"
    losses: tuple[str, ...] = ()
    """Of an undisturbed run, which is the first to be checked."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "run"
        self._newest = 0

    def run(self) -> None:
        """In a process of its own."""
        sys.argv = ["repro.train", *OPTIONS, "--out", str(self.out), "--results", str(self.out / "none")]
        train.app()

    @property
    def complete(self) -> bool:
        """Whether the last step is saved."""
        return self._newest == STEPS

    def check(self, ended: Ended, sent: signal.Signals | None) -> str:
        """As `moments.Subject` says."""
        if "Traceback" in ended.said or "error:" in ended.said:
            raise Lost(ended.said)
        newest = self._checkpoints()
        if newest < self._newest:
            raise Lost(f"step {self._newest} was saved, the newest is {newest}")
        losses = self._losses()
        if not Train.losses:
            Train.losses = tuple(losses)
        if losses != list(Train.losses[: len(losses)]) or len(losses) < newest:
            raise Lost(f"losses {losses}, undisturbed {Train.losses}, saved after {newest}")
        if sent is signal.SIGTERM:
            self._stopped(ended, len(losses), newest)
        self._newest = newest
        return f"exit {ended.code}, {newest} of {STEPS} steps are saved"

    def _stopped(self, ended: Ended, steps: int, newest: int) -> None:
        """In order, with the step under way saved; or at once, before training began or after it was done."""
        told = re.search(r"stopped by SIGTERM after (\d+) steps, saved", ended.said)
        in_order = ended.code == 0 and (newest == steps == int(told[1]) if told else newest == STEPS)
        if not in_order and ended.code != -signal.SIGTERM:
            raise Lost(f"SIGTERM ended with {ended.code} after {steps} steps, {newest} saved: {ended.said[-500:]}")
        if ended.code == -signal.SIGTERM and re.search(r"^step \d", ended.said, re.MULTILINE) and newest < STEPS:
            raise Lost(f"killed while training: {ended.said[-500:]}")

    def _checkpoints(self) -> int:
        """Steps of the newest one; all that can be seen are whole."""
        found = [0]
        for path in (self.out / "checkpoints").glob("step-*"):
            try:
                for name in ("about.json", checkpoint_index.NAME):
                    checkpoint_index.check(path, name)
                checkpoint_index.check_tensors(path, checkpoint_index.read(path), 0, 1)
            except (OSError, ValueError) as error:
                raise Lost(f"half a checkpoint, {path.name}: {error}") from error
            found.append(int(path.name.removeprefix("step-")))
        latest = self.out / "checkpoints" / "latest"
        if latest.exists() and not (latest.parent / latest.read_text().strip()).exists():
            raise Lost(f"latest names {latest.read_text()!r}, there are {found}")
        return max(found)

    def _losses(self) -> list[str]:
        """Of the steps written down; the one that a kill cut off is left out."""
        path = self.out / "steps.csv"
        if not path.exists():
            return []
        rows = list(csv.DictReader(path.read_text().rpartition("\n")[0].splitlines()))
        if [r["step"] for r in rows] != [str(k) for k in range(len(rows))]:
            raise Lost(f"steps {[r['step'] for r in rows]}")
        return [r["loss"] for r in rows]
