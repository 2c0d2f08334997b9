"""What each rank does in `test_calibrate`: memory that steps need, and that runs out on all ranks, or on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from repro.balance.types import MicroBatch, Sync
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

    def make(self, sync: Sync = "micro_batch") -> Engine:
        model = self.subject.make(torch.float32)
        model.blocks[0].register_forward_hook(lambda m, args, out: out.register_hook(self._fail) and None)
        return Engine(model, self.subject.losses, Parallelism(sync, compute="master"), OptimizerSettings(), self.world)

    def _fail(self, gradient: torch.Tensor) -> None:
        if self.short:
            raise torch.OutOfMemoryError("CUDA out of memory")


def memory_to_come() -> None:
    """What a pass alone does not hold is what a step is found to hold: moments, and gradients of earlier passes."""
    memory, whole = Memory(), sum(p.nbytes for p in wan().make(torch.float32).parameters())
    for sync in get_args(Sync):
        measured = sweep.Sweep(partial(memory.make, sync), memory.world)
        engine, alone, among = measured.engine, measured.to_come(False), measured.to_come(True)
        micro_batch = MicroBatch(wan().corpus.shapes[0], (int(np.flatnonzero(wan().corpus.bucket_of == 0)[0]),), (1.0,))
        engine.gradients([micro_batch])
        gradients = sum(p.grad.to_local().nbytes for p in engine.model.parameters())
        engine.optimizer.step()
        states = engine.optimizer.state.values()
        assert alone == sum(s[m].to_local().nbytes for s in states for m in ("exp_avg", "exp_avg_sq"))
        assert among - alone == (whole if sync == "step" else gradients) > 0
        assert measured.to_come(False) == 0 and measured.to_come(True) == among - alone
    assert whole > gradients, "shards are part of it"


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
