"""Step times and memory of the very run that is about to train, measured before it starts.

The shape benchmarking of AdaptiveLoad (arXiv 2605.17923, "no hand tuning"): micro-batches of B samples of S tokens go
forward and backward through the sharded model, all ranks with the same shape; M_mem is bisected, a cost is fitted, and
the batch policy follows. What is measured is written down at once, so that an interrupted sweep goes on.
"""

from __future__ import annotations

import csv
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist

from repro.balance.cost import PowerCost, QuadraticCost
from repro.balance.fit import FOLDS, Observations, fit
from repro.balance.models import ModelSize
from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.records import files
from repro.wan.batching import Costs
from repro.wan.engine import Engine
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Stranded, World
from repro.wan.samples import FlowLosses
from repro.wan.synthetic import SyntheticSamples

WARM_UP, REPEATS = 1, 3
ENOUGH_SECONDS = 4.0
"""A shape whose passes have taken as long is not repeated further: long passes vary little."""
MARGIN = 0.08
"""Share of the GPU's memory that stays free: fragmentation, NCCL's buffers, what other steps need at their worst."""
RESOLUTION = 0.05
"""The bisection of M_mem ends once the bounds are this close."""
AGREE_SECONDS = 60.0
"""How long a rank that ran out of memory waits for the others to have run out too."""
_LENGTHS = max(6, FOLDS)
_END = "end"
_COLUMNS = ("setting", "shape", "batch", "tokens", "seconds", "peak_bytes", "fits")


@dataclass(frozen=True)
class Probe:
    """One shape measured. seconds: median, of the slowest rank. peak_bytes: of the fullest rank; -1 on CPUs.

    fits: false where memory ran out, and seconds is NaN. passes: seconds of each pass that counts; empty if recalled.
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


@dataclass(frozen=True)
class Calibration:
    """m_mem: tokens a micro-batch. probes: what was measured. costs: fitted to those that fit. error: held out, %."""

    m_mem: int
    probes: tuple[Probe, ...]
    costs: Costs
    error: float


class Sweep:
    """Measures shapes on a live engine; every rank makes one and calls it together with the others.

    make: an engine before its first step. engine: the current one; its parameters and optimizer are as made. Where
    memory runs out it is made anew, for what FSDP was doing cannot be undone. On several ranks that takes all of them
    running out alike, as they do with the same shape under the same cap on memory, which the least free GPU sets; a
    rank that runs out alone raises `Stranded` within `AGREE_SECONDS`. path: CSV of what was measured, None to keep
    none; rows of the same `setting` (without commas) are not measured again.
    """

    def __init__(self, make: Callable[[], Engine], world: World, path: Path | None = None, setting: str = "") -> None:
        self._make, self.world, self.path, self.setting = make, world, path, setting
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=AGREE_SECONDS))
        if self._capped:
            free, total = torch.cuda.mem_get_info()
            share = -self._largest(-(free + torch.cuda.memory_reserved()) / total)[0]
            torch.cuda.set_per_process_memory_fraction(share * (1 - MARGIN / 2))
        self.engine = make()
        known: list[list[dict[str, str]]] = [_read(path) if path else []]
        dist.broadcast_object_list(known, src=0)
        self._rows = known[0]

    @property
    def _capped(self) -> bool:
        return self.world.device.type == "cuda" and self.world.size > 1

    def probe(self, shape: Shape, batch: int) -> Probe:
        """Measure, or recall, B samples of a shape."""
        for row in self._rows:
            if (row["setting"], row["shape"], row["batch"]) == (self.setting, str(shape), str(batch)):
                return Probe(shape, batch, float(row["seconds"]), int(row["peak_bytes"]), row["fits"] == "1")
        found = self._measure(shape, batch)
        self._write(shape, batch, found.tokens, found.seconds, found.peak_bytes, int(found.fits))
        return found

    @property
    def ended(self) -> int | None:
        """M_mem of a sweep that has come to its end: nothing more is measured, so that the schedule stays the same."""
        ends = [row for row in self._rows if (row["setting"], row["shape"]) == (self.setting, _END)]
        return int(ends[0]["tokens"]) if ends else None

    def end(self, m_mem: int) -> None:
        """Write down that the sweep is complete, and under which limit."""
        if self.ended is None:
            self._write(_END, 0, m_mem, 0.0, -1, 1)

    def known(self, shape: Shape, batch: int) -> bool:
        """Whether this was measured."""
        return any((r["setting"], r["shape"], r["batch"]) == (self.setting, str(shape), str(batch)) for r in self._rows)

    def close(self) -> None:
        """Lift the cap on memory and leave; the engine stays."""
        if self._capped:
            torch.cuda.set_per_process_memory_fraction(1.0)
        dist.destroy_process_group(self._group)

    def _write(self, *values: object) -> None:
        self._rows.append(dict(zip(_COLUMNS, map(str, (self.setting, *values)), strict=True)))
        if self.path is not None and self.world.is_first:
            lines = [",".join(_COLUMNS), *(",".join(row[c] for c in _COLUMNS) for row in self._rows)]
            files.replace(self.path, "".join(f"{line}\n" for line in lines).encode())

    def _measure(self, shape: Shape, batch: int) -> Probe:
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
        for i in range(WARM_UP + REPEATS):
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
        return Probe(shape, batch, statistics.median(counted), int(fullest), True, counted)

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

    def time_left(self, deadline: float) -> bool:
        """Whether every rank has time left; the same answer on all."""
        return self._largest(float(time.monotonic() > deadline))[0] == 0

    def memory_budget(self) -> int | None:
        """Bytes that a micro-batch's peak may reach on every rank; None on CPUs, where nothing counts them."""
        if self.world.device.type != "cuda":
            return None
        total = torch.cuda.get_device_properties(self.world.device).total_memory
        local = sum(cast(Any, p).to_local().numel() * 2 * p.element_size() for p in self.engine.model.parameters())
        to_come = 0 if self.engine.optimizer.state else local  # AdamW's two moments, made by the first update
        return int(-self._largest(-(total * (1 - MARGIN) - to_come))[0])


def calibrate(
    sweep: Sweep, size: ModelSize, corpus: Corpus, minutes: float, m_mem: int | None, say: Callable[[str], None]
) -> Calibration:
    """Sweep for about `minutes`, then fit.

    m_mem: tokens a micro-batch; None to find out what fits, which needs a GPU. The fewest shapes that a fit needs are
    measured however long they take. Raises ValueError where not one sample of the longest shape fits.
    """
    deadline = time.monotonic() + 60 * minutes
    shapes = sweep_shapes(corpus)
    ended = sweep.ended
    if ended is not None:
        m_mem = ended
    elif m_mem is None:
        m_mem = find_m_mem(sweep.probe, shapes, sweep.memory_budget(), say)
    probes: list[Probe] = []
    for i, (shape, batch) in enumerate(cases(shapes, m_mem)):
        if ended is not None and not sweep.known(shape, batch):
            break
        if ended is None and i >= 2 * len(shapes) and not sweep.time_left(deadline):
            break
        probes.append(sweep.probe(shape, batch))
        p = probes[-1]
        say(f"  {shape!s:>12} x {batch:<5,} {p.seconds:8.3f} s" if p.fits else f"  {shape} x {batch} does not fit")
    sweep.end(m_mem)
    fitting = [p for p in probes if p.fits]
    data = Observations(
        np.array([p.batch for p in fitting], dtype=np.int64),
        np.array([p.tokens for p in fitting], dtype=np.int64),
        np.array([p.seconds for p in fitting]),
        size.layers,
        np.ones(len(fitting), dtype=bool),
        "calibration",
    )
    power, quadratic = fit("power", data), fit("quadratic", data)
    error = quadratic.held_out_mape
    costs = Costs(
        cast(PowerCost, power.cost.extrapolating()),
        cast(QuadraticCost, quadratic.cost.extrapolating()),
        f"{len(fitting)} shapes measured by this run; held-out error {power.held_out_mape:.1f}% (power), "
        f"{error:.1f}% (quadratic)",
    )
    return Calibration(m_mem, tuple(probes), costs, error)


def sweep_shapes(corpus: Corpus) -> list[Shape]:
    """The corpus' shapes of distinct lengths, by length; where these are too few for a fit, parts of the longest too.

    At most `_LENGTHS` + 2, evenly spaced, the shortest and the longest among them.
    """
    used = [corpus.shapes[k] for k in np.flatnonzero(corpus.counts)]
    tokens = Tokenizer().tokens
    by_length = {tokens(s): s for s in used}
    longest = max(by_length.values(), key=tokens)
    shorter = [Shape(f, longest.height, longest.width) for f in range(longest.frames - 4, 0, -4)]
    lower = [Shape(longest.frames, longest.height * i // 8 // 16 * 16, longest.width) for i in (6, 4, 2, 7, 5, 3)]
    for shape in [*shorter[::2], *shorter[1::2], *(s for s in lower if s.height)]:
        if len(by_length) >= _LENGTHS:
            break
        by_length.setdefault(tokens(shape), shape)
    ordered = [by_length[n] for n in sorted(by_length)]
    picks = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), _LENGTHS + 2)).round().astype(int))
    return [ordered[i] for i in picks]


def cases(shapes: list[Shape], m_mem: int) -> Iterator[tuple[Shape, int]]:
    """B and S of the sweep, the most telling first: full micro-batches, single samples, then what lies between."""
    most = [max(1, m_mem // Tokenizer().tokens(s)) for s in shapes]
    seen = set()
    middles = ([round(b**0.5) for b in most], [round(b**0.75) for b in most], [round(b**0.25) for b in most])
    for sizes in (most, [1] * len(shapes), *middles):
        for shape, batch in zip(shapes, sizes, strict=True):
            if (shape, batch) not in seen:
                seen.add((shape, batch))
                yield shape, batch


def find_m_mem(
    probe: Callable[[Shape, int], Probe], shapes: list[Shape], budget: int | None, say: Callable[[str], None]
) -> int:
    """Tokens of the largest micro-batch within `budget` bytes, by bisection over batches of the shortest shape.

    The shortest shape needs most memory a token, since every sample brings its text along. A batch is only tried where
    the line through what was measured says that it fits, so memory runs out, if ever, close to its limit.
    Raises ValueError without a budget, and where one sample of the longest shape does not fit.
    """
    if budget is None:
        raise ValueError("memory is not measured on CPUs: give --m-mem TOKENS")
    tokens = Tokenizer().tokens
    shortest, longest = shapes[0], shapes[-1]

    def fits(p: Probe) -> bool:
        return p.fits and p.peak_bytes <= budget

    alone = probe(longest, 1)
    if not fits(alone):
        raise ValueError(f"one sample of {longest} ({tokens(longest):,} tokens) does not fit: use more ranks")
    low = probe(shortest, max(1, tokens(longest) // tokens(shortest) // 2))
    at_one = probe(shortest, 1)
    high: int | None = None
    while fits(low) and (high is None or high - low.batch > max(1, RESOLUTION * low.batch)):
        slope = max(1.0, (low.peak_bytes - at_one.peak_bytes) / max(1, low.batch - at_one.batch))
        by_line = low.batch + int((budget - low.peak_bytes) / slope)
        batch = min(by_line, 2 * low.batch if high is None else (low.batch + high) // 2)
        if batch <= low.batch:
            break
        tried = probe(shortest, batch)
        low, high = (tried, high) if fits(tried) else (low, batch)
    found = max(low.batch * tokens(shortest) if fits(low) else 0, tokens(longest))
    say(f"M_mem {found:,} tokens: {MARGIN:.0%} of memory kept free, to {RESOLUTION:.0%}")
    return found


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open() as file:
        return [row for row in csv.DictReader(file) if None not in row.values()]
