"""Rows of the kernel suites: one implementation timed beside the streams and the implementations it is compared with.

Metrics: time (us, device, cold cache), time_called (us, from Python, launches included; not of a GPU whose host is
busier than it has cores), bandwidth (GB/s of necessary traffic), ceiling (% of the fastest large stream with the same
mix of reads and writes), ceiling_same_size (% of such a stream over as many bytes), speedup (over eager in the same
dtype).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch

from repro.measure import machine, norm_modulate, stream
from repro.measure.norm_problem import FORMS, Direction, FormName, Problem
from repro.measure.stats import Interval, measured, median_interval, ratio_interval
from repro.suite import Case, CaseSkipped, Measurement

DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
    "fp32": (torch.float32, None),
    "fp32-bf16": (torch.float32, torch.bfloat16),
}
"""dtype of x, and of y where it differs, by the name that rows carry."""


_STREAM_ATTEMPTS = 3
_ABOVE_STREAMS = 3.0
"""% above the fastest stream up to which a time is believed. The streams are the fastest that were found, not what the
memory can do: Inductor's fp32 norm over 5,120 channels read up to 101.9% of them on an H200 (csrc/NOTES.md), and a
bound that refuses such times hides who is ahead. What does not move all its bytes is further off, or its result wrong.
"""


class HarnessError(RuntimeError):
    """A measurement that cannot be true."""


def parse(case: Case) -> tuple[str, Direction, Problem]:
    """Implementation, pass and problem of a case. Raises ValueError for an unknown pass, KeyError for form or dtype."""
    key = case.key
    form = cast(FormName, key["form"])
    if form not in FORMS:
        raise KeyError(form)
    dtype, out = DTYPES[str(key["dtype"])]
    problem = Problem(int(key["batch"]), int(key["tokens"]), int(key["dim"]), dtype, form, out)
    direction = key["pass"]
    if direction != "forward" and direction != "backward":
        raise ValueError(f"pass must be forward or backward, got {direction!r}")
    return str(key["impl"]), cast(Direction, direction), problem


@dataclass
class Bench:
    """Times of this process, so that ratios are formed of samples that were taken side by side.

    seconds: about how long each of the two times of an implementation is measured.
    """

    device: torch.device
    seconds: float
    _times: dict[tuple[str, Direction, Problem], norm_modulate.Times] = field(default_factory=dict, repr=False)

    def times(self, impl: str, direction: Direction, problem: Problem) -> norm_modulate.Times:
        """Times of an implementation, measured where they are not there yet. Those of the last problem are kept."""
        key = (impl, direction, problem)
        if key not in self._times:
            self._times = {k: t for k, t in self._times.items() if k[2] == problem}
            self._times[key] = norm_modulate.measure(impl, direction, problem, self.device, self.seconds)
        return self._times[key]

    def forget(self, impl: str, direction: Direction, problem: Problem) -> None:
        """Drop the times of an implementation, so that the next call measures it anew."""
        self._times.pop((impl, direction, problem), None)

    def rows(self, impl: str, direction: Direction, problem: Problem, seed: str) -> list[Measurement]:
        """Check and time one implementation, and what it is compared with where this process has not yet.

        seed: of the bootstrap intervals. Raises HarnessError for a bandwidth far above the ceiling,
        `repro.measure.verify.WrongResultError` for a wrong result, `repro.measure.peers.PeerUnavailable`.
        """
        times = self.times(impl, direction, problem)
        traffic = stream.Traffic(times.device, problem.traffic(direction))
        same = stream.Traffic(self.times("stream", direction, problem).device, traffic.bytes)
        rows = [
            measured("time", "us", median_interval(times.device.samples_us, seed), times.device.samples_us),
            measured("bandwidth", "GB/s", median_interval(traffic.us_per_gb, seed).map(lambda us: 1e6 / us)),
            measured("ceiling", "%", self._ceiling(impl, direction, problem, traffic, same, seed)),
        ]
        if self.device.type != "cuda" or machine.load_average() <= machine.host_cores():
            called = times.called.samples_us
            rows.insert(1, measured("time_called", "us", median_interval(called, seed), called))
        if impl == "stream":
            return rows
        rows.append(measured("ceiling_same_size", "%", _percent_of(same, traffic, seed)))
        if impl != "eager":
            eager = self.times("eager", direction, problem)
            speedup = ratio_interval(eager.device.samples_us, times.device.samples_us, seed)
            rows.append(measured("speedup", "x", speedup))
        return rows

    def _ceiling(
        self,
        impl: str,
        direction: Direction,
        problem: Problem,
        traffic: stream.Traffic,
        same_size: stream.Traffic,
        seed: str,
    ) -> Interval:
        """Share of the fastest stream, the one over tensors of this size included."""
        mix = FORMS[problem.form].mix(direction)
        for attempt in range(_STREAM_ATTEMPTS):
            # The chip may have been slower when the streams were measured: they may try again.
            best = stream.best(problem.dtype, mix, self.device, again=attempt > 0)
            if _median(same_size) < _median(best):
                stream.offer(same_size, problem.dtype, mix, self.device)
                best = same_size
            ceiling = _percent_of(best, traffic, seed)
            if impl == "stream" or self.device.type != "cuda" or ceiling.low <= 100:
                return ceiling
        if ceiling.low <= 100 + _ABOVE_STREAMS:
            return ceiling
        raise HarnessError(
            f"{impl} {direction} over {problem} reads {ceiling.value:.1f}% [{ceiling.low:.1f}, {ceiling.high:.1f}] of "
            "the fastest stream: it cannot have moved all its bytes through memory while it was timed"
        )


def _median(traffic: stream.Traffic) -> float:
    return statistics.median(traffic.us_per_gb)


@functools.cache
def bench(suite: str, device: str, seconds: float) -> Bench:
    """The bench of a suite, one in a process."""
    return Bench(torch.device(device), seconds)


def require_kernels(impl: str) -> None:
    """Raise CaseSkipped where an implementation needs the CUDA kernels and they are not there."""
    from repro.adaln import build

    if impl in norm_modulate.OWN and not build.ensure_loaded():
        raise CaseSkipped(f"the CUDA kernels are not there: {build.failure()}")


def without_memory_error(measure: Callable[[], list[Measurement]], case: Case) -> list[Measurement]:
    """measure(), where running out of memory skips the case and frees what was taken."""
    try:
        return measure()
    except torch.OutOfMemoryError as e:
        reason = f"{dict(case.key)} does not fit into memory: {str(e).splitlines()[0]}"
    # Outside the handler: the exception's traceback holds the tensors that are to be freed.
    torch.cuda.empty_cache()
    raise CaseSkipped(reason)


def _percent_of(best: stream.Traffic, own: stream.Traffic, seed: str) -> Interval:
    """Bandwidth of a call in % of a stream's."""
    return ratio_interval(best.us_per_gb, own.us_per_gb, seed).map(lambda ratio: 100 * ratio)
