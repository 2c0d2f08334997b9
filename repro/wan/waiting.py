"""How long a rank waits for the others, told apart from what it computes.

FSDP makes ranks meet where a block's parameters are gathered (before its forward and before its backward) and where
the last gradients are reduced. Marks on either side of these places, on the stream that computes, give the wait; the
rest of the step is the rank's own. A gather that hides under compute shows as no wait, as it should. The backward pass
of the embeddings, which is short and ends the step, cannot be told from waiting for the last reductions.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

Mark = torch.cuda.Event | float


class WaitClock:
    """Marks where `modules` wait: create it, `before_sharding`, shard the model, `after_sharding`.

    Hooks run in the order of their registration, so those set before and after FSDP's own stand around them.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._waits: list[tuple[Mark, Mark]] = []
        self._open: dict[tuple[nn.Module, str], Mark] = {}
        self._tail: Mark | None = None
        self._start: Mark | None = None

    def before_sharding(self, modules: list[nn.Module]) -> None:
        """Hooks that must run after FSDP's `prepend` hooks forward, and before its others."""
        for module in modules:
            module.register_forward_pre_hook(lambda m, _: self._close(m, "forward"))
            module.register_forward_hook(lambda m, _, out: self._on_gradient(out, lambda: self._begin(m, "backward")))

    def after_sharding(self, modules: list[nn.Module]) -> None:
        """The hooks on the other side; the first of `modules` ends the backward pass."""
        for module in modules:
            module.register_forward_pre_hook(lambda m, _: self._begin(m, "forward"), prepend=True)
            module.register_forward_hook(lambda m, _, out: self._on_gradient(out, lambda: self._close(m, "backward")))
        modules[0].register_forward_pre_hook(self._mark_tail_of_backward)

    def start(self) -> None:
        """A step begins."""
        self._waits.clear()
        self._open.clear()
        self._tail, self._start = None, self._now()

    def backward_done(self) -> None:
        """A micro-batch's backward pass has returned: what came after its first block was waiting for reductions."""
        if self._tail is not None:
            self._waits.append((self._tail, self._now()))
            self._tail = None

    def stop(self) -> tuple[float, float]:
        """Seconds from `start` to here, and of these, waited. Waits for the device."""
        assert self._start is not None
        end = self._now()
        if isinstance(end, torch.cuda.Event):
            end.synchronize()
        return self._seconds(self._start, end), sum(self._seconds(a, b) for a, b in self._waits)

    def _now(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _seconds(a: Mark, b: Mark) -> float:
        if isinstance(a, torch.cuda.Event) and isinstance(b, torch.cuda.Event):
            return a.elapsed_time(b) / 1e3
        assert isinstance(a, float) and isinstance(b, float)
        return b - a

    def _begin(self, module: nn.Module, direction: str) -> None:
        self._open[module, direction] = self._now()

    def _close(self, module: nn.Module, direction: str) -> None:
        begun = self._open.pop((module, direction), None)
        if begun is not None:
            self._waits.append((begun, self._now()))

    def _mark_tail_of_backward(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        self._on_gradient(args[0], self._mark_tail)

    def _mark_tail(self) -> None:
        self._tail = self._now()

    @staticmethod
    def _on_gradient(tensor: Any, action: Any) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: action())
