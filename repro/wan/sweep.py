"""Step times and memory of B samples of S tokens, measured on a live engine: forward and backward through FSDP.

All ranks take the same shape at once. What is measured is written down at once, so that an interrupted sweep goes on.
Two use it: `repro.wan.calibrate`, before a run, and the suite `shape_sweep`.
"""

from __future__ import annotations

import csv
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.records import files
from repro.wan.engine import Engine
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Stranded, World, on_first
from repro.wan.samples import FlowLosses
from repro.wan.synthetic import SyntheticSamples

WARM_UP, REPEATS = 1, 3
ENOUGH_SECONDS = 4.0
"""A shape whose passes have taken as long is not repeated further: long passes vary little."""
MARGIN = 0.08
"""Share of the GPU's memory that stays free: fragmentation, NCCL's buffers, what other steps need at their worst."""
AGREE_SECONDS = 60.0
"""How long a rank that ran out of memory waits for the others to have run out too."""
_END = "end"
_COLUMNS = ("setting", "shape", "batch", "tokens", "seconds", "peak_bytes", "fits")


@dataclass(frozen=True)
class Probe:
    """One shape measured. seconds: median, of the slowest rank. peak_bytes: of the fullest rank; -1 on CPUs.

    fits: false where memory ran out. passes: seconds of each pass that counts; empty if recalled. seconds is NaN where
    it does not fit and where only its memory was asked for.
    """

    shape: Shape
    batch: int
    seconds: float
    peak_bytes: int
    fits: bool
    passes: tuple[float, ...] = field(default=(), compare=False)

    @property
    def tokens(self) -> int:
        """Of one sample."""
        return Tokenizer().tokens(self.shape)


class Sweep:
    """Measures shapes on a live engine; every rank makes one and calls it together with the others.

    make: an engine before its first step. engine: the current one; its parameters and optimizer are as made. Where
    memory runs out it is made anew, for what FSDP was doing cannot be undone. On several ranks that takes all of them
    running out alike, as they do with the same shape under the same cap on memory, which the least free GPU sets; a
    rank that runs out alone raises `Stranded` within `AGREE_SECONDS`. path: CSV of what was measured, None to keep
    none; rows of the same `setting` (without commas) are not measured again.

    Raises on all ranks what the first one meets at `path`: ValueError for another file, OSError (on others WorldError).
    """

    def __init__(self, make: Callable[[], Engine], world: World, path: Path | None = None, setting: str = "") -> None:
        self._make, self.world, self.path, self.setting = make, world, path, setting
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_SECONDS))
        if self._capped:
            free, total = torch.cuda.mem_get_info()
            share = -self._largest(-(free + torch.cuda.memory_reserved()) / total)[0]
            torch.cuda.set_per_process_memory_fraction(share * (1 - MARGIN / 2))
        self.engine = make()
        known = [on_first(world, lambda: _read(path) if path else [])]
        dist.broadcast_object_list(known, src=0)
        self._rows = known[0] or []

    @property
    def _capped(self) -> bool:
        return self.world.device.type == "cuda" and self.world.size > 1

    def probe(self, shape: Shape, batch: int, timed: bool = True) -> Probe:
        """Measure, or recall, B samples of a shape; untimed, a single pass tells how much memory they take."""
        for known in self.recorded():
            if (known.shape, known.batch) == (shape, batch) and not (
                timed and known.fits and math.isnan(known.seconds)
            ):
                return known
        found = self._measure(shape, batch, timed)
        self._write(shape, batch, found.tokens, found.seconds, found.peak_bytes, int(found.fits))
        return found

    def recorded(self) -> list[Probe]:
        """Everything measured under this setting, in order."""
        return [
            Probe(
                Shape(*map(int, row["shape"].split("x"))),
                int(row["batch"]),
                float(row["seconds"]),
                int(row["peak_bytes"]),
                row["fits"] == "1",
            )
            for row in self._rows
            if row["setting"] == self.setting and row["shape"] != _END
        ]

    @property
    def ended(self) -> int | None:
        """M_mem of a sweep that has come to its end: nothing more is measured, so that the schedule stays the same."""
        ends = [row for row in self._rows if (row["setting"], row["shape"]) == (self.setting, _END)]
        return int(ends[0]["tokens"]) if ends else None

    def end(self, m_mem: int) -> None:
        """Write down that the sweep is complete, and under which limit."""
        if self.ended is None:
            self._write(_END, 0, m_mem, 0.0, -1, 1)

    def close(self) -> None:
        """Lift the cap on memory and leave; the engine stays."""
        if self._capped:
            torch.cuda.set_per_process_memory_fraction(1.0)
        dist.destroy_process_group(self._group)

    def _write(self, *values: object) -> None:
        self._rows.append(dict(zip(_COLUMNS, map(str, (self.setting, *values)), strict=True)))
        if self.path is not None:
            lines = [",".join(_COLUMNS), *(",".join(row[c] for c in _COLUMNS) for row in self._rows)]
            content = "".join(f"{line}\n" for line in lines).encode()
            on_first(self.world, partial(files.replace, self.path, content), self._group)

    def _measure(self, shape: Shape, batch: int, timed: bool) -> Probe:
        cuda = self.world.device.type == "cuda"
        bucket = np.zeros(batch, dtype=np.int32)
        corpus = Corpus("sweep", "made up", (shape,), np.array([Tokenizer().tokens(shape)]), bucket)
        losses = FlowLosses(SyntheticSamples(corpus), FlowMatching(), self.world.device)
        micro_batch = MicroBatch(shape, tuple(range(batch)), (1 / batch,) * batch)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        passes: list[float] = []
        ran_out = False
        for i in range(WARM_UP + REPEATS if timed else 1):
            mine = self._pass(micro_batch, losses)
            slowest, ran_out = self._agree(f"{shape} x {batch}", mine)
            if ran_out:
                break
            passes.append(slowest)
            if i >= WARM_UP and sum(passes[WARM_UP:]) > ENOUGH_SECONDS:
                break
        (fullest,) = self._largest(float(torch.cuda.max_memory_allocated()) if cuda else -1.0)
        if ran_out:
            del self.engine
            gc.collect()  # hooks refer to modules in circles
            if cuda:
                torch.cuda.empty_cache()
            self.engine = self._make()
            return Probe(shape, batch, float("nan"), int(fullest), False)
        counted = tuple(passes[WARM_UP:])
        return Probe(shape, batch, statistics.median(counted or [math.nan]), int(fullest), True, counted)

    def _pass(self, micro_batch: MicroBatch, losses: FlowLosses) -> float | None:
        """Seconds of a forward and backward pass on this rank; None where memory ran out."""
        try:
            self.engine.clock.start()
            self.engine.gradients([micro_batch], losses=losses)
            seconds = self.engine.clock.stop()[0]
            self.engine.optimizer.zero_grad()
        except torch.OutOfMemoryError:
            return None
        return seconds

    def _agree(self, what: str, mine: float | None) -> tuple[float, bool]:
        """Seconds of the slowest rank, and whether memory ran out, on all of them.

        Raises Stranded where it ran out here only: the others are then waiting in the middle of the pass.
        """
        try:
            slowest, ran_out = self._largest(mine or 0.0, float(mine is None))
        except RuntimeError as error:
            if mine is not None:
                raise
            raise Stranded(
                f"ran out of memory at {what}, and {AGREE_SECONDS:g} s later other ranks had not: give --m-mem, or end "
                "what else runs on this rank's GPU"
            ) from error
        return slowest, ran_out > 0

    def _largest(self, *values: float) -> list[float]:
        """Each value's maximum over ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [float(v) for v in tensor.tolist()]

    def seconds_left(self, deadline: float) -> float:
        """Until `deadline` on this host's clock, of the rank that has least left; the same on all."""
        return -self._largest(time.monotonic() - deadline)[0]

    def memory_budget(self, accumulates: bool) -> int | None:
        """Bytes that a micro-batch's peak may reach on every rank; None on CPUs, where nothing counts them.

        accumulates: a step may have several micro-batches, so that the gradients of those before stay beside it.
        """
        if self.world.device.type != "cuda":
            return None
        total = torch.cuda.get_device_properties(self.world.device).total_memory
        return int(-self._largest(-(total * (1 - MARGIN) - self.to_come(accumulates)))[0])

    def to_come(self, accumulates: bool) -> int:
        """Bytes on this rank that a step holds and a pass alone does not, as `memory_budget`.

        They are AdamW's two moments, made by the first update, and the gradients of earlier micro-batches, sharded
        like the parameters, or whole with `sync=step`. The peak is where the backward pass begins: a pass alone has no
        gradients there yet.
        """
        parameters = [cast(Any, p) for p in self.engine.model.parameters()]
        local = sum(p.to_local().numel() * p.element_size() for p in parameters)
        whole = sum(p.numel() * p.element_size() for p in parameters)
        moments = 0 if self.engine.optimizer.state else 2 * local
        return moments + (whole if self.engine.parallelism.sync == "step" else local) * accumulates


def _read(path: Path) -> list[dict[str, str]]:
    """What was written down; a last row that was cut off is left out. Raises ValueError for any other file."""
    if not path.exists():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        if lines and tuple(lines[0]) != _COLUMNS:
            raise ValueError(f"its first line must be {','.join(_COLUMNS)}")
        if len(lines) > 1 and len(lines[-1]) < len(_COLUMNS):
            del lines[-1]
        rows = [dict(zip(_COLUMNS, line, strict=True)) for line in lines[1:]]
        timed: set[tuple[str, str, str]] = set()
        for row in rows:
            _check(row)
            key = row["setting"], row["shape"], row["batch"]
            if key in timed:
                raise ValueError(f"{row['shape']} x {row['batch']} is there twice")
            if not math.isnan(float(row["seconds"])):  # memory alone may be followed by times
                timed.add(key)
    except (csv.Error, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record of a sweep ({error}): move it away to measure anew") from error
    return rows


def _check(row: dict[str, str]) -> None:
    """Raise ValueError for what no sweep writes."""
    seconds, end = float(row["seconds"]), row["shape"] == _END
    if seconds < 0 or math.isinf(seconds):
        raise ValueError(f"seconds must be positive and finite, got {seconds}")
    for name, least in (("batch", 0 if end else 1), ("tokens", 1), ("peak_bytes", -1)):
        if not least <= int(row[name]) < 1 << 63:
            raise ValueError(f"{name} must be at least {least} and below 2^63, got {row[name]}")
    if row["fits"] not in ("0", "1"):
        raise ValueError(f"fits must be 0 or 1, got {row['fits']!r:.80}")
    if not end and int(row["tokens"]) != (tokens := Tokenizer().tokens(Shape(*map(int, row["shape"].split("x"))))):
        raise ValueError(f"{row['shape']} has {tokens} tokens, got {row['tokens']}")
