"""What suites have ranks do (`repro.wan.launch`) to see where a step's memory goes, and how long a sample it allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from repro.balance.types import MicroBatch
from repro.corpus.shapes import Shape, Tokenizer
from repro.measure.memory import saved_by_autograd
from repro.wan.engine import SampleLosses
from repro.wan.parallel import World
from repro.wan.probing import Setting
from repro.wan.probing_epoch import Kept, alone, keep

FRAME = (256, 400)
"""Height and width of the samples: 400 tokens a latent frame, by which lengths differ."""


def shape_of(latent_frames: int, frame: Sequence[int] = FRAME) -> Shape:
    """The clip of so many latent frames."""
    return Shape(4 * latent_frames - 3, frame[0], frame[1])


def longest(
    world: World, *, most: int, start: int, budget: int | None = None, frame: Sequence[int] = FRAME, **setting: Any
) -> dict[str, Any]:
    """The longest single sample whose forward and backward passes stay within `budget` bytes.

    start: latent frames to begin with; budget None: only these are measured. most: frames that are not gone beyond.
    Returns `frames`, `tokens`, and of the longest sample `static`, `held` and `peak`, bytes: what is there before the
    pass (the parameters), what the forward pass leaves for the backward pass, and the most at any time, both included;
    on CPUs, where nothing counts peaks, it is the sum of the two. `probed`: lengths tried.
    Raises ValueError where not even one frame fits.
    """
    kept = keep(Setting(**setting), world)
    _memory(kept, world, shape_of(1, frame))  # makes workspaces that stay
    known: dict[int, tuple[int, int, int]] = {}

    def peak(frames: int) -> int:
        if frames not in known:
            known[frames] = _memory(kept, world, shape_of(frames, frame))
        return known[frames][2]

    best = start
    if budget is None:
        peak(start)
    else:
        peak(1)
        best = _search(peak, budget, start, most, known[1][0])
    static, held, top = known[best]
    tokens = Tokenizer().tokens(shape_of(best, frame))
    return {"frames": best, "tokens": tokens, "static": static, "held": held, "peak": top, "probed": sorted(known)}


def _search(peak: Callable[[int], int], budget: int, start: int, most: int, static: int) -> int:
    """Most frames with peak(frames) <= budget, where peaks grow with frames: along the last secant, or by halves.

    static: bytes without any sample. The first secant begins there, not at a short sample, whose peak is that of the
    gradients at the end of its backward pass. Raises ValueError where not even one frame fits.
    """
    if peak(1) > budget:
        raise ValueError(f"one latent frame takes {peak(1):,} bytes, more than the budget of {budget:,}")
    fits, fails, guess = 1, most + 1, max(1, min(start, most))
    before, before_peak = 0, static
    for halve in itertools.cycle((False, False, False, True)):  # a line may mislead, halves do not
        if fails - fits == 1:
            return fits
        guess = (fits + fails) // 2 if halve else min(max(guess, fits + 1), fails - 1)
        here = peak(guess)
        if here <= budget:
            fits = guess
        else:
            fails = guess
        slope = (here - before_peak) / (guess - before)
        before, before_peak, guess = guess, here, int(guess + (budget - here) / slope) if slope > 0 else most
    raise AssertionError


def _memory(kept: Kept, world: World, shape: Shape) -> tuple[int, int, int]:
    """Bytes before the passes of one sample on every rank, left by its forward pass, and at the peak."""
    losses, micro_batch = alone(world, shape, 1)
    cuda = world.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    static = torch.cuda.memory_allocated() if cuda else _parameter_bytes(kept.engine.model)
    noting = _Noting(losses, cuda)
    kept.engine.gradients([micro_batch], losses=noting)
    if cuda:
        torch.cuda.synchronize()
    kept.engine.optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated() if cuda else static + noting.held
    return static, noting.held - (static if cuda else 0), peak


class _Noting:
    """Losses that note what their forward pass has left behind."""

    def __init__(self, losses: SampleLosses, cuda: bool) -> None:
        self._losses, self._cuda, self.held = losses, cuda, 0

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
        if self._cuda:
            found = self._losses(model, micro_batch, epoch)
            self.held = torch.cuda.memory_allocated()
            return found
        results: list[Tensor] = []
        saved = saved_by_autograd(lambda: results.append(self._losses(model, micro_batch, epoch)))
        self.held = saved.bytes
        return results[0]


def _parameter_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
