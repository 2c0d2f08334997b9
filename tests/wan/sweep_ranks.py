"""What each rank does in `test_calibrate`: memory that runs out on all ranks, or on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from repro.corpus.shapes import Shape
from repro.wan import sweep
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.parallel import Parallelism, Stranded, join
from tests.wan.gradient_ranks import wan

SMALL, LARGE = Shape(1, 32, 32), Shape(5, 32, 48)


class Memory:
    """Makes engines whose backward passes run out of memory, in their middle, while `short`."""

    def __init__(self) -> None:
        self.short, self.world, self.subject = False, join("cpu"), wan()

    def make(self) -> Engine:
        model = self.subject.make(torch.float32)
        model.blocks[0].register_forward_hook(lambda m, args, out: out.register_hook(self._fail) and None)
        return Engine(model, self.subject.losses, Parallelism(compute="master"), OptimizerSettings(), self.world)

    def _fail(self, gradient: torch.Tensor) -> None:
        if self.short:
            raise torch.OutOfMemoryError("CUDA out of memory")


def out_of_memory(folder: str) -> None:
    """Together the ranks go on; alone a rank says so within the time stated, and leaves."""
    sweep.AGREE_SECONDS = 2.0
    memory = Memory()
    measured = sweep.Sweep(memory.make, memory.world)
    assert measured.probe(SMALL, 2).fits
    memory.short = True
    assert not measured.probe(LARGE, 3).fits
    memory.short = False
    assert measured.probe(LARGE, 2).fits
    memory.short = memory.world.rank == 1
    # The other one hangs in a collective until its peer is gone.
    with pytest.raises(RuntimeError if memory.world.rank == 0 else Stranded) as raised:
        measured.probe(SMALL, 3)
    Path(folder, str(memory.world.rank)).write_text(str(raised.value))
