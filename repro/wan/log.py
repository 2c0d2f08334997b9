"""What a run says while it trains: a line or a bar for people, a CSV row a step and rank, TensorBoard on request."""

from __future__ import annotations

import csv
import importlib.util
import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from repro.records import files
from repro.wan.engine import StepResult

COLUMNS = (
    "step",
    "epoch",
    "rank",
    "loss",
    "lr",
    "grad_norm",
    "skipped",
    "samples",
    "tokens",
    "micro_batches",
    "step_seconds",
    "compute_seconds",
    "wait_seconds",
    "peak_memory_bytes",
    "mfu",
    "hfu",
)
"""loss to skipped, step_seconds, mfu and hfu are the step's, the same on every rank; the rest is the rank's.

step_seconds: from the end of the step before to the end of this one, data and update included. compute_seconds and
wait_seconds: of forward and backward passes. mfu, hfu: model and hardware FLOPs utilization (Chowdhery et al. 2022,
"PaLM", appendix B; Korthikanti et al. 2022), 3 times the forward pass's FLOPs, and with what checkpointing recomputes,
over the peak of all GPUs. A cell is empty where the value is unknown: MFU, HFU and memory on a CPU.
"""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step's samples on all ranks. model: 3 times the blocks' forward pass. hardware: with recomputation."""

    model: float
    hardware: float


@dataclass(frozen=True)
class LoggedStep:
    """One step for the log. flops: over all ranks. seconds: of the whole step."""

    step: int
    epoch: int
    seconds: float
    flops: StepFlops
    result: StepResult

    def mfu(self, peak: float | None) -> float | None:
        """Model FLOPs as a share of `peak` FLOP/s on every rank; None where that is unknown."""
        return self._share(self.flops.model, peak)

    def hfu(self, peak: float | None) -> float | None:
        """The same of FLOPs as executed."""
        return self._share(self.flops.hardware, peak)

    def _share(self, flops: float, peak: float | None) -> float | None:
        return flops / self.seconds / (peak * len(self.result.ranks)) if peak else None


class StepCsv:
    """The CSV of a run, appended step by step; after a resume it goes on from there, without what was not kept.

    Raises OSError where it cannot be written, ValueError for a file with other columns.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        kept: list[str] = []
        if path.exists():
            # What follows the last newline was cut off by a kill.
            header, *rows = path.read_text(errors="replace").split("\n")[:-1] or [""]
            if header != ",".join(COLUMNS):
                raise ValueError(f"{path} is no step log of this version: move it away")
            for row in rows:
                if row.count(",") != len(COLUMNS) - 1 or not row.split(",", 1)[0].isdecimal():
                    raise ValueError(f"{path} has a damaged row, {row[:40]!r}: move it away")
            kept = [r for r in rows if int(r.split(",", 1)[0]) < first_step]
        files.replace(path, "".join(f"{line}\n" for line in [",".join(COLUMNS), *kept]).encode())
        self.path, self._unwritten = path, ""

    def append(self, logged: LoggedStep, peak: float | None) -> None:
        """Write a step's rows, in one write, after those that could not be written before."""
        text, result = io.StringIO(), logged.result
        shares = [f"{share:.4f}" if share is not None else "" for share in (logged.mfu(peak), logged.hfu(peak))]
        writer = csv.writer(text, lineterminator="\n")
        for rank, r in enumerate(result.ranks):
            writer.writerow(
                [
                    logged.step,
                    logged.epoch,
                    rank,
                    repr(result.loss),
                    f"{result.lr:.6g}",
                    f"{result.grad_norm:.6g}",
                    int(result.skipped),
                    r.samples,
                    r.tokens,
                    r.micro_batches,
                    f"{logged.seconds:.6g}",
                    f"{r.compute_seconds:.6g}",
                    f"{r.wait_seconds:.6g}",
                    r.peak_bytes if r.peak_bytes >= 0 else "",
                    *shares,
                ]
            )
        self._unwritten += text.getvalue()
        files.append(self.path, self._unwritten.encode())
        self._unwritten = ""


class RunLog:
    """The first rank's log: everything that it is told goes to the screen, the CSV and, if asked, TensorBoard.

    steps: of the whole run. peak: FLOP/s of one GPU, None where unknown. every: steps between lines where the output is
    no terminal. tensorboard: event files too (see `require_tensorboard`).
    """

    def __init__(
        self,
        folder: Path,
        first_step: int,
        steps: int,
        peak: float | None,
        console: Console,
        every: int = 10,
        tensorboard: bool = False,
    ) -> None:
        self._csv = StepCsv(folder / "steps.csv", first_step)
        self._peak, self._console, self._every, self._last = peak, console, every, steps - 1
        self._writer = _tensorboard(folder, first_step) if tensorboard else None
        self._skipped = self._steps = self._samples = self._tokens = 0
        self._seconds = 0.0
        self._began, self._first = time.monotonic(), first_step
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=steps, completed=first_step)
            self._bar.start()

    def say(self, lines: Sequence[str]) -> None:
        """Lines for people."""
        for line in lines:
            self._console.print(line, markup=False, highlight=False)

    def step(self, logged: LoggedStep) -> None:
        """One more step is done. Raises OSError where it cannot be written down."""
        self._csv.append(logged, self._peak)
        self._skipped += logged.result.skipped
        self._steps += 1
        self._samples += logged.result.samples
        self._tokens += logged.result.tokens
        self._seconds += logged.seconds
        text = self._text(logged)
        if self._bar is not None:
            self._bar.update(self._task, completed=logged.step + 1, description=text)
        elif logged.step % self._every == 0 or logged.step == self._last:
            self.say([f"step {logged.step}  {text}  left {self._left(logged.step)}"])
        if self._writer is not None:
            for name, value in self._scalars(logged).items():
                self._writer.add_scalar(name, value, logged.step)

    def summary(self) -> str:
        """What was done since the start, or since going on, in one line."""
        if not self._steps:
            return f"nothing left to do: {self._last + 1:,} steps are done; a larger --steps goes on"
        return (
            f"{self._steps:,} steps in {_clock(self._seconds)}: {self._samples:,} samples, "
            f"{self._samples / self._seconds:.3g} samples/s, {self._tokens / self._seconds:,.0f} tokens/s; "
            f"a row a step and rank in {self._csv.path}"
        )

    def close(self) -> None:
        """Put the terminal back, and flush."""
        if self._bar is not None:
            self._bar.stop()
        if self._writer is not None:
            self._writer.close()

    def _text(self, logged: LoggedStep) -> str:
        result, mfu, hfu = logged.result, logged.mfu(self._peak), logged.hfu(self._peak)
        parts = [
            f"loss {result.loss:.4f}",
            f"{result.tokens / logged.seconds:,.0f} tokens/s",
            f"MFU {mfu:.1%}  HFU {hfu:.1%}" if mfu is not None and hfu is not None else "MFU unknown",
            f"{logged.seconds:.2f} s/step",
        ]
        return "  ".join(parts + ([f"{self._skipped} skipped"] if self._skipped else []))

    def _left(self, step: int) -> str:
        per_step = (time.monotonic() - self._began) / (step + 1 - self._first)
        return _clock(per_step * (self._last - step))

    def _scalars(self, logged: LoggedStep) -> dict[str, float]:
        result = logged.result
        shares = {"mfu": logged.mfu(self._peak), "hfu": logged.hfu(self._peak)}
        scalars = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens_per_s": result.tokens / logged.seconds,
            "step_seconds": logged.seconds,
            "max_wait_seconds": max(r.wait_seconds for r in result.ranks),
        }
        return scalars | {name: share for name, share in shares.items() if share is not None}


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def require_tensorboard() -> None:
    """Raise ValueError where TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("--tensorboard needs the package tensorboard: pip install tensorboard")


def _tensorboard(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
