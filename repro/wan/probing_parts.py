"""What suites have ranks do (`repro.wan.launch`) to see where a step's time goes: AdaLN by marks, kernels by name.

Kernels of a discrete norm-modulate cannot be told by name from other elementwise work. So marks stand around each call:
CUDA events on the stream that computes, before and after it in the forward pass, in the recomputation, and (through
identity functions that autograd meets on its way back) in the backward pass. In between nothing else runs.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from repro.corpus.shapes import Shape
from repro.wan.block import NormModulate
from repro.wan.parallel import World
from repro.wan.probing import Setting, Triple
from repro.wan.probing_epoch import alone, keep, slowest, step
from repro.wan.waiting import Mark, WaitClock

WARM_UP, MARKED = 2, 2

CLASSES = (
    ("communication", re.compile("nccl", re.I)),
    ("attention", re.compile("flash|fmha|sdpa|attention|mem_eff", re.I)),
    ("matmul", re.compile("gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|wgmma|16816|matmul", re.I)),
    ("copy", re.compile("memcpy|memset", re.I)),
)
"""What a kernel does, by its name: the first that matches; attention before matmul, which its names mention too."""


def parts(world: World, *, frames_height_width: Triple, batch: int, repeats: int, **setting: Any) -> dict[str, Any]:
    """Whole steps of one micro-batch a rank, then steps with marks around AdaLN, then one under the profiler.

    Returns `seconds` of each unmarked step; `marked` and `norm_modulate`, seconds of each marked step and of AdaLN in
    it, on the slowest rank; `kernels`, device seconds of this rank's kernels by class in a step, empty where nothing
    can be seen; `peak_bytes` of an unmarked step (-1 on CPUs).
    """
    kept = keep(Setting(**setting), world)
    kept.engine.losses, micro_batch = alone(world, Shape(*frames_height_width), batch)
    for _ in range(WARM_UP):
        step(kept, world, [micro_batch])
    seconds, peak = [], -1
    for _ in range(repeats):
        took, result = step(kept, world, [micro_batch])
        seconds.append(took)
        peak = max(peak, *(r.peak_bytes for r in result.ranks))
    marked, inside = [], []
    clock = _Sections(world.device)
    with _marks(kept.engine.model, clock):
        for _ in range(MARKED):
            clock.clear()
            marked.append(step(kept, world, [micro_batch])[0])
            inside.append(clock.seconds())
    kernels = _kernels(lambda: step(kept, world, [micro_batch])) if world.device.type == "cuda" else {}
    return {
        "seconds": slowest(seconds),
        "marked": slowest(marked),
        "norm_modulate": slowest(inside),
        "kernels": kernels,
        "peak_bytes": peak,
    }


class _Sections(WaitClock):
    """Time between pairs of marks on the stream that computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pairs: list[tuple[Mark, Mark]] = []
        self._began: Mark | None = None

    def clear(self) -> None:
        """Forget all sections."""
        self._pairs.clear()
        self._began = None

    def begin(self) -> None:
        """A section begins here."""
        self._began = self._now()

    def end(self) -> None:
        """And ends here."""
        if self._began is not None:
            self._pairs.append((self._began, self._now()))
        self._began = None

    def seconds(self) -> float:
        """Of all sections. The device must be idle."""
        return sum(self._seconds(a, b) for a, b in self._pairs)


class _In(torch.autograd.Function):
    """Inputs of a section, as they are; on the way back the section ends here."""

    @staticmethod
    def forward(ctx: Any, clock: _Sections, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.clock = clock
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.clock.end()
        return None, *gradients


class _Out(torch.autograd.Function):
    """Its output, as it is; on the way back the section begins here."""

    @staticmethod
    def forward(ctx: Any, clock: _Sections, y: Tensor) -> Tensor:
        ctx.clock = clock
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.clock.begin()
        return None, gradient


@contextlib.contextmanager
def _marks(model: nn.Module, clock: _Sections) -> Iterator[None]:
    """Marks around every modulated norm of `model`, as long as the context lasts."""
    found = [cast(Any, m) for m in model.modules() if hasattr(m, "norm_modulate")]
    before: list[tuple[Any, NormModulate]] = [(m, m.norm_modulate) for m in found]
    for module, own in before:
        module.norm_modulate = _marked(own, clock)
    try:
        yield
    finally:
        for module, own in before:
            module.norm_modulate = own


def _marked(own: NormModulate, clock: _Sections) -> NormModulate:
    def norm_modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        x, shift, scale = cast(tuple[Tensor, ...], _In.apply(clock, x, shift, scale))
        clock.begin()
        y = own(x, shift, scale)
        clock.end()
        return cast(Tensor, _Out.apply(clock, y))

    return norm_modulate


def _kernels(run: Callable[[], object]) -> dict[str, float]:
    """Device seconds by class of what runs on this rank's GPU; empty where the profiler sees no kernels."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # CUPTI is missing, or another's; the steps' own times do not need it
        return {}
    found: dict[str, float] = {}
    for event in profiler.events() or ():
        annotation = getattr(event, "is_user_annotation", False)  # spans kernels that are there themselves
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotation:
            name = next((n for n, pattern in CLASSES if pattern.search(event.name)), "other")
            found[name] = found.get(name, 0.0) + event.time_range.elapsed_us() / 1e6
    return found
