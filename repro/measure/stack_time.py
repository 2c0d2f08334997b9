"""Time and memory of one micro-batch through a `BlockStack`, forward and backward, without communication.

The clock starts on an idle device and stops when the last gradient is written, so shapes too small to keep the GPU
busy show the launches that they are bound by, as a training loop would. Gradients are dropped between iterations and
written anew (the first micro-batch of a step); their making is inside the interval, that of the inputs outside.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from repro.adaln import get_impl
from repro.balance.models import TEXT_TOKENS, ModelSize
from repro.measure.block_stack import BlockStack
from repro.wan.rope import rope_table

SHORT_MS = 300.0
"""Iterations shorter than this are warmed up twice: it costs little, and they are the ones that jitter."""


@dataclass(frozen=True)
class StackSample:
    """One case, measured.

    milliseconds: forward + backward, one value an iteration. Bytes as the CUDA allocator counts them, None on a CPU:
    static_bytes (weights), held_bytes (inputs, output and checkpoints alive between forward and backward, weights left
    out), peak_bytes (most that was allocated at once, weights and their gradients included).
    """

    milliseconds: tuple[float, ...]
    static_bytes: int | None
    held_bytes: int | None
    peak_bytes: int | None


def measure_stack(
    size: ModelSize,
    layers: int,
    adaln: str,
    batch: int,
    tokens: int,
    device: torch.device,
    seconds: float = 1.0,
    repeats: tuple[int, int] = (4, 12),
) -> StackSample:
    """Run `layers` blocks over bf16 [batch, tokens, dim], fully checkpointed, AdaLN one of `repro.adaln.IMPLS`.

    The first iteration does not count (it also picks attention and matmul kernels for the shape). As many are timed
    as fit into `seconds`, within the bounds `repeats`.

    Raises torch.OutOfMemoryError where it does not fit, FloatingPointError where a result is not finite.
    """
    stack = _stack(size, layers, device)
    stack.use(get_impl(adaln))
    static = _allocated(device)
    micro_batch = _MicroBatch(stack, batch, tokens, device)
    milliseconds, held = micro_batch.warm_up()
    if milliseconds < SHORT_MS:
        milliseconds = micro_batch.run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    count = min(max(math.ceil(1e3 * seconds / milliseconds), repeats[0]), repeats[1])
    times = tuple(micro_batch.run() for _ in range(count))
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    micro_batch.check()
    micro_batch.drop_gradients()
    return StackSample(times, static, None if held is None or static is None else held - static, peak)


def free() -> None:
    """Drop the cached stack and the allocator's free blocks, e.g. after running out of memory."""
    _stack.cache_clear()
    if torch.cuda.is_available():  # on a CPU nobody waits for the memory, and looking for garbage takes a while
        gc.collect()
        torch.cuda.empty_cache()


class _MicroBatch:
    """Random inputs of a stack, and the iteration over them."""

    def __init__(self, stack: BlockStack, batch: int, tokens: int, device: torch.device) -> None:
        dim = stack.size.dim
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

        self.stack, self.device = stack, device
        self.dout_BSD = normal(batch, tokens, dim)
        self.x_BSD = normal(batch, tokens, dim).requires_grad_()
        self.time_B6D = normal(batch, 6, dim, dtype=torch.float32).requires_grad_()
        self.text_BTD = normal(batch, TEXT_TOKENS, dim).requires_grad_()
        # Angles do not change the cost, so one axis may carry the whole sequence.
        self.rope_S1K = rope_table((tokens, 1, 1), dim // stack.size.heads, device)

    def forward(self) -> Tensor:
        return self.stack(self.x_BSD, self.time_B6D, self.text_BTD, self.rope_S1K)

    def warm_up(self) -> tuple[float, int | None]:
        """Milliseconds of one iteration, and the bytes allocated between its forward and its backward."""
        clock = Clock(self.device)
        out_BSD = self.forward()
        held = _allocated(self.device)
        out_BSD.backward(self.dout_BSD)
        return clock.stop(), held

    def run(self) -> float:
        """Milliseconds of one iteration."""
        self.drop_gradients()
        clock = Clock(self.device)
        self.forward().backward(self.dout_BSD)
        return clock.stop()

    def drop_gradients(self) -> None:
        self.stack.zero_grad(set_to_none=True)
        self.x_BSD.grad = self.time_B6D.grad = self.text_BTD.grad = None

    def check(self) -> None:
        """Raise FloatingPointError unless every gradient of the last iteration is there and finite."""
        inputs = {"x": self.x_BSD, "time": self.time_B6D, "text": self.text_BTD}
        for name, tensor in (inputs | dict(self.stack.named_parameters())).items():
            if tensor.grad is None or not bool(tensor.grad.isfinite().all()):
                raise FloatingPointError(f"gradient of {name} is missing or not finite after the timed iterations")


class Clock:
    """Started on an idle device; `stop` waits for the device and returns milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self.begin = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self.begin = torch.cuda.Event(enable_timing=True)
            self.begin.record()
        self.start = time.perf_counter()

    def stop(self) -> float:
        if self.begin is None:
            return 1e3 * (time.perf_counter() - self.start)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return self.begin.elapsed_time(end)


@lru_cache(maxsize=1)
def _stack(size: ModelSize, layers: int, device: torch.device) -> BlockStack:
    """The stack is kept while cases of the same size follow each other."""
    torch.manual_seed(0)
    stack = BlockStack(size, layers, get_impl("eager"), device)
    if device.type == "cuda":
        warm_clocks(device)
    return stack


def warm_clocks(device: torch.device, seconds: float = 1.5) -> None:
    """Multiply matrices for a while, so that the first case runs at the clocks of a GPU under load."""
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(20):
            torch.mm(a, a)
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None
