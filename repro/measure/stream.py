"""Plain streaming kernels: the bandwidth that a memory-bound kernel with the same mix of reads and writes can hope for.

Each output is made from inputs of its own: `2 a` of one, `a + b` of two, `a + b c` of three. PyTorch's element-wise
kernels and, where Triton is installed, a kernel of `stream_kernel` in several configurations; the fastest counts, since
none of them is the fastest for every mix, size and dtype. No copies: captured in a CUDA graph, a copy becomes a memcpy
node, which reads low.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from repro.measure import timing
from repro.measure.verify import Subject, verified_time

logger = logging.getLogger(__name__)

Kernel = Callable[[Sequence[Tensor], Sequence[Tensor]], None]
"""Fills the outputs from the inputs."""

TOLERANCE = 5e-3
"""Relative error of a row after one rounding to bfloat16 (unit roundoff 2^-8), with room to spare."""

_LARGE_GPU = (1 << 28, 1 << 29, 1 << 30, 1 << 31)
_LARGE_CPU = (1 << 23,)
_ROW = 4096


@dataclass(frozen=True)
class Mix:
    """How many tensors of one size are read and written: 1:1 is the mix of a normalization's forward.

    Raises ValueError unless each of 1 or 2 outputs has 1 to 3 inputs of its own.
    """

    reads: int
    writes: int

    def __post_init__(self) -> None:
        if self.writes not in (1, 2) or not self.writes <= self.reads <= 3 * self.writes:
            raise ValueError(f"a stream has 1 or 2 writes and 1 to 3 reads for each, got {self.reads}:{self.writes}")

    @property
    def tensors(self) -> int:
        """Tensors that move."""
        return self.reads + self.writes


def groups(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """The inputs of each output: as even a split as there is, the first output taking one more where need be."""
    first = -(-len(inputs) // len(outputs))
    return [inputs[:first], inputs[first:]][: len(outputs)]


@dataclass(frozen=True)
class Traffic:
    """Times of a call and the bytes that it has to move."""

    timing: timing.Timing
    bytes: int

    @property
    def us_per_gb(self) -> tuple[float, ...]:
        """Samples as microseconds a GB (10^9 bytes): what streams of different sizes are compared by."""
        return tuple(1e9 * us / self.bytes for us in self.timing.samples_us)


@dataclass(frozen=True)
class _Set:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def call(self, kernel: Kernel) -> tuple[Tensor, ...]:
        kernel(self.inputs, self.outputs)
        return self.outputs

    def reference(self) -> tuple[Tensor, ...]:
        return tuple(_exact(*group) for group in groups(self.inputs, self.outputs))

    def refill(self, seed: int) -> None:
        generator = torch.Generator(self.inputs[0].device).manual_seed(seed)
        for tensor in self.inputs:
            tensor.normal_(generator=generator)


def subjects(shape: tuple[int, ...], dtype: torch.dtype, mix: Mix, device: torch.device) -> list[Subject]:
    """The fastest streaming kernel over tensors of `shape`, one subject an input set, random and checked like any.

    Call it inside `timing.work_stream(device)`.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    sets = []
    for seed in range(timing.set_count(size * mix.tensors, device)):
        tensors = [torch.empty(shape, dtype=dtype, device=device) for _ in range(mix.tensors)]
        sets.append(_Set(tuple(tensors[: mix.reads]), tuple(tensors[mix.reads :])))
        sets[-1].refill(seed)
    kernel = _fastest(sets, device)
    return [
        Subject(
            call=functools.partial(s.call, kernel),
            inputs={f"input {i}": tensor for i, tensor in enumerate(s.inputs)},
            outputs=tuple(f"output {i}" for i in range(mix.writes)),
            reference=s.reference,
            refill=s.refill,
            tolerance=TOLERANCE,
        )
        for s in sets
    ]


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, mix: Mix, device: torch.device, seconds: float = 0.2
) -> Traffic:
    """Device time of the fastest stream over tensors of `shape`. Raises as `verify.verified_time`."""
    with timing.work_stream(device):
        timed = verified_time(subjects(shape, dtype, mix, device), device, seconds)
    return Traffic(timed, torch.Size(shape).numel() * dtype.itemsize * mix.tensors)


_best: dict[tuple[torch.dtype, Mix, torch.device], Traffic] = {}


def best(dtype: torch.dtype, mix: Mix, device: torch.device, again: bool = False) -> Traffic:
    """The fastest of several large streams (tensors of 0.27 to 2.15 GB on a GPU, 8 MB on a CPU): the ceiling.

    Measured once a process. again: measure once more, and keep the faster. Sizes that do not fit are left out. A stream
    over tensors of another size that was offered (`offer`) and is faster takes its place.
    """
    key = dtype, mix, device
    if again or key not in _best:
        sizes: tuple[int, ...] = _LARGE_CPU
        if device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(device)[0]
            # Beside the tensors: each output in float64 (four times a bfloat16), and temporaries of that size.
            sizes = tuple(s for s in _LARGE_GPU if s * (mix.tensors + 4 * mix.writes + 8) <= free) or _LARGE_CPU
        seconds = 0.2 if device.type == "cuda" else 0.0
        found = [measure((s // dtype.itemsize // _ROW, _ROW), dtype, mix, device, seconds) for s in sizes]
        for traffic in found:
            offer(traffic, dtype, mix, device)
    return _best[key]


def offer(traffic: Traffic, dtype: torch.dtype, mix: Mix, device: torch.device) -> None:
    """Let a stream that was measured over tensors of some other size be the ceiling, if it is the fastest so far."""
    key = dtype, mix, device
    known = [_best[key]] if key in _best else []
    _best[key] = min([*known, traffic], key=lambda t: statistics.median(t.us_per_gb))


def _exact(a: Tensor, *others: Tensor) -> Tensor:
    exact = a.double()
    if not others:
        return exact.mul_(2)
    return exact.add_(others[0]) if len(others) == 1 else exact.addcmul_(others[0].double(), others[1].double())


def _elementwise(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """PyTorch's element-wise kernels, one an output."""
    for (a, *others), out in zip(groups(inputs, outputs), outputs, strict=True):
        if not others:
            torch.mul(a, 2, out=out)
        elif len(others) == 1:
            torch.add(a, *others, out=out)
        else:
            torch.addcmul(a, *others, out=out)


def _fastest(sets: Sequence[_Set], device: torch.device) -> Kernel:
    """The kernel with the lowest median over a few samples."""
    kernels = [_elementwise, *_triton_kernels(device)]
    if len(kernels) == 1:
        return kernels[0]

    def median(kernel: Kernel) -> float:
        calls = [functools.partial(s.call, kernel) for s in sets]
        return statistics.median(timing.device_time(calls, device, seconds=0).samples_us)

    return min(kernels, key=median)


@functools.cache
def _triton_kernels(device: torch.device) -> tuple[Kernel, ...]:
    """Triton's kernels, where it is installed and works on the device (it needs a C compiler as well)."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return ()
    try:
        from repro.measure import stream_kernel

        def make(block_bytes: int, warps: int) -> Kernel:
            return lambda inputs, outputs: stream_kernel.run(groups(inputs, outputs), outputs, block_bytes, warps)

        kernels = [make(*config) for config in stream_kernel.CONFIGS]
        a, out = torch.ones(_ROW, device=device), torch.empty(_ROW, device=device)
        for kernel in kernels:
            kernel([a], [out])
        torch.cuda.synchronize(device)
    except Exception:  # a toolchain fails in as many ways as there are machines
        logger.warning("Triton does not work here: streams are PyTorch's kernels only", exc_info=True)
        return ()
    return tuple(kernels)
