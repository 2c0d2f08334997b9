"""Time of calls on a device, and as called from Python.

Device time. On a GPU the calls, one per input set, are captured into a CUDA graph, and a sample is the time of one
replay between two events, divided by the number of calls. Inside the interval: the kernels and the gaps between
dependent kernels. Outside: Python, the launches (the graph is launched while the GPU is busy with the replay before
it), making the inputs, allocation. The cache is cold: the sets together are several times larger than L2
(`set_count`), so that by the time a set comes round again its data has been evicted; a training step never finds its
activations in L2 either. Calls that cannot be captured are timed one by one between two events (`method="events"`)
after a kernel that overwrites L2; gaps where the GPU waits for Python then count.

Beware when timing plain copies: captured in a graph, `copy_` becomes a memcpy node that reads far too low.

Time as called: N calls in a row and one synchronization, on the wall clock, divided by N. At small sizes this is the
cost of launching from Python, which is what a user feels.

On a CPU both are wall clock times, of the same calls; caches are not flushed.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]
"""Runs the work on one input set and returns what it wrote."""

Method = Literal["graph", "events", "clock"]

MIN_SAMPLES = 30
MAX_SAMPLES = 200
WARM_UP = 3
"""Passes before anything is captured or timed: compilation, autotuning and lazy loading happen in the first."""

_L2_MARGIN = 3
_STREAMING = 16
"""A set this many times larger than L2 evicts itself: nothing useful of its start is left when its end is reached."""

_CALLED_BATCH_US = 1000.0
_CALLED_BATCH = 50


@dataclass(frozen=True)
class Timing:
    """samples_us: microseconds of one call, one value a sample. method: how. calls: input sets, or calls in a row.

    Raises ValueError for a sample that no clock gives.
    """

    samples_us: tuple[float, ...]
    method: Method
    calls: int

    def __post_init__(self) -> None:
        wrong = [s for s in self.samples_us if not 0 < s < math.inf]  # written so that NaN is one
        if wrong:
            raise ValueError(f"a sample of {wrong[0]} us is no time: something tampered with the clock")


def set_count(set_bytes: int, device: torch.device) -> int:
    """How many input sets of `set_bytes` (inputs and outputs) to rotate over for a cold cache on `device`.

    Enough to exceed 3x L2, at least two, so that no result can stem from another call; one where a set alone is far
    larger than L2. Two on a CPU.
    """
    if set_bytes <= 0:
        raise ValueError(f"set_bytes must be positive, got {set_bytes}")
    if device.type != "cuda":
        return 2
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if set_bytes >= _STREAMING * l2 else max(2, math.ceil(_L2_MARGIN * l2 / set_bytes))


@contextlib.contextmanager
def work_stream(device: torch.device) -> Iterator[None]:
    """The stream on which inputs are made, forwards run and graphs are captured; nothing on a CPU.

    Autograd runs a backward on its forward's stream, and that stream must be the one that is captured.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_stream(device)):
        yield
        _stream(device).synchronize()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class Pass(ABC):
    """All calls once, one after the other, as often as asked. `outputs` are those of the last run, one entry a call."""

    method: Method

    def __init__(self, calls: Sequence[Call]) -> None:
        if not calls:
            raise ValueError("a pass needs at least one call, got none")
        self.calls = tuple(calls)
        self.outputs: list[tuple[Tensor, ...]] = []

    @abstractmethod
    def run(self) -> None:
        """Run every call once and wait for the results, which are then in `outputs`."""

    @abstractmethod
    def _sample(self, count: int) -> list[float]:
        """Take `count` samples, microseconds of one call each, after which `outputs` are those of the last run."""

    @abstractmethod
    def poison(self) -> None:
        """Fill what the last run wrote with NaN, such that the next run can neither leave it nor hand it out again."""

    def time(self, seconds: float) -> Timing:
        """Time the calls for about `seconds`, but with at least 30 samples (and at most 200)."""
        microseconds = self._sample(1)[0] * len(self.calls)
        count = min(max(math.ceil(1e6 * seconds / microseconds), MIN_SAMPLES), MAX_SAMPLES)
        return Timing(tuple(self._sample(count)), self.method, len(self.calls))

    def close(self) -> None:
        """Free what the pass holds."""
        self.outputs = []

    def _fill_with_nan(self) -> None:
        with torch.no_grad():
            for output in (t for outputs in self.outputs for t in outputs if t.is_floating_point()):
                output.detach().fill_(math.nan)


class ClockPass(Pass):
    """Calls on a CPU, on the wall clock."""

    method: Method = "clock"

    def run(self) -> None:
        """See `Pass`."""
        self.outputs = [call() for call in self.calls]

    def _sample(self, count: int) -> list[float]:
        samples = []
        for _ in range(count):
            self.outputs = []
            start = time.perf_counter()
            outputs = [call() for call in self.calls]
            samples.append(1e6 * (time.perf_counter() - start) / len(self.calls))
            self.outputs = outputs
        return samples

    def poison(self) -> None:
        """See `Pass`. The poisoned memory is then given back, so that fresh outputs are likely to be made from it."""
        self._fill_with_nan()
        self.outputs = []


class EventPass(ClockPass):
    """Calls on a GPU that cannot be captured, one by one between two events, each after a flush of L2."""

    method: Method = "events"

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        super().__init__(calls)
        self._flush = l2_flush(device)
        self._device = device
        for _ in range(WARM_UP):
            self.run()

    def run(self) -> None:
        """See `Pass`."""
        super().run()
        torch.cuda.synchronize(self._device)

    def _sample(self, count: int) -> list[float]:
        events = []
        for i in range(max(count, len(self.calls))):
            call = self.calls[i % len(self.calls)]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush()
            start.record()
            outputs = call()
            end.record()
            events.append((start, end))
            self.outputs[i % len(self.calls) : i % len(self.calls) + 1] = [outputs]
        torch.cuda.synchronize(self._device)
        return [1e3 * start.elapsed_time(end) for start, end in events]


class GraphPass(Pass):
    """Calls captured into one CUDA graph; a sample is one replay."""

    method: Method = "graph"

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        super().__init__(calls)
        self._device = device
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                for call in self.calls:
                    call()
        stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Outputs are kept, so that every set writes memory of its own and none is found in L2.
        with torch.cuda.graph(self._graph, stream=stream):
            self.outputs = [call() for call in self.calls]

    def run(self) -> None:
        """See `Pass`."""
        self._graph.replay()
        torch.cuda.synchronize(self._device)

    def _sample(self, count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        self._graph.replay()  # keeps the GPU busy while the first timed replay is being launched
        for start, end in events:
            start.record()
            self._graph.replay()
            end.record()
        torch.cuda.synchronize(self._device)
        return [1e3 * start.elapsed_time(end) / len(self.calls) for start, end in events]

    def poison(self) -> None:
        """See `Pass`. A graph writes the same memory in every replay, so filling it is enough."""
        self._fill_with_nan()

    def close(self) -> None:
        """Free the graph and its memory."""
        super().close()
        self._graph.reset()


def make_pass(calls: Sequence[Call], device: torch.device, method: Method | None = None) -> Pass:
    """Prepare calls for running and timing; on a GPU they are warmed up, and captured unless method is "events".

    Call it, and everything that makes the inputs, inside `work_stream(device)`.

    Raises ValueError for a method that the device does not have; RuntimeError where a call cannot be captured.
    """
    default: Method = "graph" if device.type == "cuda" else "clock"
    match (device.type == "cuda", method or default):
        case (False, "clock"):
            return ClockPass(calls)
        case (True, "graph"):
            return GraphPass(calls, device)
        case (True, "events"):
            return EventPass(calls, device)
    raise ValueError(f"method {method!r} does not fit a {device.type} device: leave it out for {default!r}")


def device_time(
    calls: Sequence[Call], device: torch.device, seconds: float = 0.3, method: Method | None = None
) -> Timing:
    """Device time of one call, over rotating calls (one per input set), unverified: `verify.verified_time` checks too.

    Raises as `make_pass`.
    """
    with work_stream(device):
        timed = make_pass(calls, device, method)
        try:
            return timed.time(seconds)
        finally:
            timed.close()


def called_time(calls: Sequence[Callable[[], object]], device: torch.device, seconds: float = 0.2) -> Timing:
    """Wall-clock time of one call from Python, launches included: N calls, a synchronization, divided by N.

    N is chosen so that a batch takes about a millisecond (at most 50), and the calls rotate over the input sets.
    Takes about `seconds`, but at least 30 samples (at most 200).
    """
    if not calls:
        raise ValueError("called_time needs at least one call, got none")
    batch = [calls[i % len(calls)] for i in range(_CALLED_BATCH)]

    def sample(count: int) -> float:
        start = time.perf_counter()
        for call in batch[:count]:
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e6 * (time.perf_counter() - start) / count

    with work_stream(device):
        for _ in range(WARM_UP):
            sample(len(calls[:_CALLED_BATCH]))
        once = min(sample(1) for _ in range(3))
        in_a_row = min(max(round(_CALLED_BATCH_US / once), 1), _CALLED_BATCH)
        count = min(max(math.ceil(1e6 * seconds / (once * in_a_row)), MIN_SAMPLES), MAX_SAMPLES)
        samples = tuple(sample(in_a_row) for _ in range(count))
    return Timing(samples, "clock", in_a_row)


@functools.cache
def _flush_buffer(device: torch.device) -> Tensor:
    size = _L2_MARGIN * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(max(size, 256 << 20) // 4, dtype=torch.int32, device=device)


def l2_flush(device: torch.device) -> Callable[[], None]:
    """A kernel that reads and writes more than L2 holds, so that whatever runs next finds none of its data there."""
    buffer = _flush_buffer(device)

    def flush() -> None:
        buffer.add_(1)

    return flush
