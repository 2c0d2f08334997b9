"""Plain streaming kernels: the bandwidth that a memory-bound kernel with the same mix of reads and writes can hope for.

1 read : 1 write is `out = 2 a`, the mix of a normalization's forward; 2 : 1 is `out = a + b`, the mix of its backward.
Both are element-wise kernels on purpose: a copy captured in a CUDA graph becomes a memcpy node, which reads low.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.measure import timing
from repro.measure.verify import Subject, verified_time

TOLERANCE = 5e-3
"""Relative error of a row after one rounding to bfloat16 (unit roundoff 2^-8), with room to spare."""

_LARGE_GPU = (1 << 28, 1 << 29, 1 << 30)
_LARGE_CPU = (1 << 23,)
_ROW = 4096


@dataclass(frozen=True)
class Traffic:
    """Times of a call and the bytes that it has to move."""

    timing: timing.Timing
    bytes: int

    @property
    def us_per_gb(self) -> tuple[float, ...]:
        """Samples as microseconds a GB (10^9 bytes): what streams of different sizes are compared by."""
        return tuple(1e9 * us / self.bytes for us in self.timing.samples_us)


def subject(shape: tuple[int, ...], dtype: torch.dtype, reads: int, device: torch.device, seed: int) -> Subject:
    """A stream over tensors of `shape`, reads of them in and one out, random and checked like any kernel.

    Raises ValueError unless reads is 1 or 2.
    """
    if reads not in (1, 2):
        raise ValueError(f"reads must be 1 or 2, got {reads}")
    generator = torch.Generator(device).manual_seed(seed)
    inputs = [torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(reads)]

    out = torch.empty_like(inputs[0])

    def call() -> tuple[Tensor, ...]:
        return (torch.mul(inputs[0], 2, out=out) if reads == 1 else torch.add(*inputs, out=out),)

    def reference() -> tuple[Tensor, ...]:
        exact = inputs[0].double()
        return (exact.mul_(2) if reads == 1 else exact.add_(inputs[1]),)

    def refill(seed: int) -> None:
        again = torch.Generator(device).manual_seed(seed)
        for tensor in inputs:
            tensor.normal_(generator=again)

    names = ("a", "b")[:reads]
    return Subject(call, dict(zip(names, inputs, strict=True)), ("out",), reference, refill, TOLERANCE)


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, reads: int, device: torch.device, seconds: float = 0.2
) -> Traffic:
    """Device time of a stream over tensors of `shape`. Raises as `subject` and `verify.verified_time`."""
    size = torch.Size(shape).numel() * dtype.itemsize * (reads + 1)
    with timing.work_stream(device):
        sets = [subject(shape, dtype, reads, device, i) for i in range(timing.set_count(size, device))]
        return Traffic(verified_time(sets, device, seconds), size)


@functools.cache
def best(dtype: torch.dtype, reads: int, device: torch.device) -> Traffic:
    """The fastest of several large streams (tensors of 0.27 to 1.07 GB on a GPU, 8 MB on a CPU): the ceiling.

    Measured once a process; `best.cache_clear()` asks for it again. Sizes that do not fit into a quarter of the free
    memory are left out.
    """
    sizes: tuple[int, ...] = _LARGE_CPU
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # The float64 reference of a bfloat16 stream takes four times a tensor's size, twice over.
        sizes = tuple(s for s in _LARGE_GPU if 12 * s <= free) or _LARGE_CPU
    seconds = 0.2 if device.type == "cuda" else 0.0
    found = [measure((s // dtype.itemsize // _ROW, _ROW), dtype, reads, device, seconds) for s in sizes]
    return min(found, key=lambda t: sorted(t.us_per_gb)[len(t.us_per_gb) // 2])
