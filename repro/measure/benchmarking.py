"""Kernels under pytest-benchmark: a timer that reads device time, and rounds that are checked before and after.

pytest-benchmark reads the timer before and after a call and subtracts. On CUDA a reading is an event, and only
the subtraction waits; the L2 flush queued before the round keeps the GPU busy meanwhile, so that the launch is hidden
unless it outlasts the flush. Calibration never runs: rounds are pedantic, one call each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from repro.measure import timing, verify

ROUNDS = 30
WARM_UP = 3


class DeviceInstant:
    """A point in the current CUDA stream's work. The difference of two is the device time between them, in seconds."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def __sub__(self, earlier: DeviceInstant) -> float:
        """Wait for this point, and return the seconds since `earlier`."""
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3


def timer() -> Callable[[], Any]:
    """The timer for this machine's benchmarks."""
    return DeviceInstant if torch.cuda.is_available() else time.perf_counter


def run(benchmark: Any, subjects: Sequence[verify.Subject], device: torch.device, rounds: int = ROUNDS) -> None:
    """Benchmark the subjects' call through pytest-benchmark's fixture, one subject after the other.

    Call it, and everything that makes the inputs, inside `timing.work_stream(device)`.

    Raises verify.WrongResultError where a result is wrong before or after, there on new inputs.
    """
    verify.check_once(subjects)
    flush = timing.l2_flush(device) if device.type == "cuda" else lambda: None
    turn = 0

    def setup() -> tuple[tuple[timing.Call], dict[str, Any]]:
        nonlocal turn
        turn += 1
        flush()
        return (subjects[turn % len(subjects)].call,), {}

    benchmark.pedantic(lambda call: call(), setup=setup, rounds=rounds, warmup_rounds=WARM_UP, iterations=1)
    for seed, subject in enumerate(subjects, start=1):
        subject.refill(seed)
    verify.check_once(subjects)
