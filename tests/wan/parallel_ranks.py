"""What each rank does in `test_parallel`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from repro.balance.types import MicroBatch
from repro.wan.engine import Engine, NonFiniteLoss, OptimizerSettings
from repro.wan.parallel import Parallelism, join
from tests.wan import standin

SETTINGS = OptimizerSettings(lr=1e-2, warmup=2, clip=0.05)


def micro_batches(step: int, rank: int) -> list[MicroBatch]:
    """Two of one sample each, of another shape on every rank."""
    return [MicroBatch(standin.SHAPES[(rank + i) % 3], (10 * step + 2 * rank + i,), (0.25,)) for i in range(2)]


def losses_after(parallelism: Parallelism, device: str) -> list[float]:
    """Losses of three steps."""
    world = join(device)
    engine = Engine(standin.make(), standin.losses, parallelism, SETTINGS, world)
    found = []
    for step in range(3):
        result = engine.step(step, micro_batches(step, world.rank), [4, 4])
        assert result.lr == SETTINGS.lr * (0.5 if step == 0 else 1.0)
        assert result.samples == 2 * world.size and len(result.ranks) == world.size and not result.skipped
        assert all(0 <= r.wait_seconds <= r.seconds for r in result.ranks)
        found.append(result.loss)
    return found


def plain_losses(ranks: int) -> list[float]:
    """The same three steps in one process, with PyTorch's own loop."""
    model, found = standin.make(), []
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=SETTINGS.weight_decay)
    for step in range(3):
        loss = sum(0.25 * standin.losses(model, m, 0).sum() for rank in range(ranks) for m in micro_batches(step, rank))
        loss.backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), SETTINGS.clip) > SETTINGS.clip
        optimizer.param_groups[0]["lr"] = SETTINGS.lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def non_finite() -> None:
    """A NaN on one rank: all ranks stop and name the sample, before any update; or all skip, count and go on."""
    world = join("cpu")

    def losses(model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
        found = standin.losses(model, micro_batch, epoch)
        return found * torch.tensor([float("nan") if i == broken else 1.0 for i in micro_batch.sample_ids])

    broken = 13  # the last one's, in step 1
    for action in ("stop", "skip"):
        settings = replace(SETTINGS, on_nonfinite=action)
        engine = Engine(standin.make(), losses, Parallelism(compute="master"), settings, world)
        assert not engine.step(0, micro_batches(0, world.rank), [4, 4]).skipped
        before = [p.full_tensor().clone() for p in engine.model.parameters()]
        if action == "stop":
            with pytest.raises(NonFiniteLoss, match="loss is not finite; samples 13") as raised:
                engine.step(1, micro_batches(1, world.rank), [4, 4])
            assert raised.value.sample_ids == (13,)
        else:
            assert engine.step(1, micro_batches(1, world.rank), [4, 4]).skipped
        after = [p.full_tensor() for p in engine.model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if action == "skip":
            result = engine.step(2, micro_batches(2, world.rank), [4, 4])
            assert not result.skipped and result.loss == result.loss


def every_form(device: str = "cpu") -> None:
    """The losses of a plain loop, to float64 rounding, for every sync and checkpointing; and they fall."""
    expected = plain_losses(join(device).size)
    assert expected[2] < expected[0]
    for sync, checkpointing in itertools.product(("micro_batch", "step"), ("none", "selective", "full")):
        got = losses_after(Parallelism(sync, checkpointing, compute="master"), device)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-9, atol=0)
