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


def gradients_not_finite() -> None:
    """A loss of 0 whose slope is infinite: told by the gradient, before any update; or skipped."""
    world = join("cpu")

    def losses(model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
        found = standin.losses(model, micro_batch, epoch)
        return (0 * found).abs().sqrt() if 13 in micro_batch.sample_ids else found

    for action in ("stop", "skip"):
        engine = Engine(
            standin.make(), losses, Parallelism(compute="master"), replace(SETTINGS, on_nonfinite=action), world
        )
        engine.step(0, micro_batches(0, world.rank), [4, 4])
        if action == "stop":
            with pytest.raises(NonFiniteLoss, match="gradient is not finite"):
                engine.step(1, micro_batches(1, world.rank), [4, 4])
        else:
            assert engine.step(1, micro_batches(1, world.rank), [4, 4]).skipped
        assert all(p.full_tensor().isfinite().all() for p in engine.model.parameters())


def fillers_are_no_samples() -> None:
    """A micro-batch of weight 0 is run, so that ranks stay together, and counts for nothing."""
    world = join("cpu")
    engine = Engine(standin.make(), standin.losses, Parallelism(compute="master"), SETTINGS, world)
    real, filler = (MicroBatch(standin.SHAPES[i], (i,), (weight,)) for i, weight in ((0, 1 / world.size), (1, 0.0)))
    result = engine.step(0, [real, filler], [5, 7])
    assert result.samples == world.size and [(r.samples, r.tokens) for r in result.ranks] == [(1, 5)] * world.size


def exchanges() -> None:
    """Where ranks meet: parameters gathered and gradients reduced in every micro-batch, or once a step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    world, counted = join("cpu"), {"foreach_all_gather": 0, "foreach_reduce": 0}

    def counting(name: str):
        call = getattr(fsdp, name)

        def count(*args, **kwargs):
            counted[name] += 1
            return call(*args, **kwargs)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in counted:
            patch.setattr(fsdp, name, counting(name))
        found = {}
        for sync, count in itertools.product(("micro_batch", "step"), (1, 3)):
            engine = Engine(standin.make(), standin.losses, Parallelism(sync, compute="master"), SETTINGS, world)
            own = [MicroBatch(standin.SHAPES[0], (i,), (1 / (count * world.size),)) for i in range(count)]
            engine.step(0, own, [4] * count)  # the first makes buffers
            counted.update(dict.fromkeys(counted, 0))
            engine.step(1, own, [4] * count)
            found[sync, count] = tuple(counted.values())
    groups = found["step", 1][1]
    assert groups > 1
    assert found["micro_batch", 3] == tuple(3 * n for n in found["micro_batch", 1])
    assert found["step", 3] == found["step", 1] == (groups, groups)
    assert found["micro_batch", 1] == (2 * groups, groups), "gathered again for the backward"


def every_form(device: str = "cpu") -> None:
    """The losses of a plain loop, to float64 rounding, for every sync and checkpointing; and they fall."""
    expected = plain_losses(join(device).size)
    assert expected[2] < expected[0]
    for sync, checkpointing in itertools.product(("micro_batch", "step"), ("none", "selective", "full")):
        got = losses_after(Parallelism(sync, checkpointing, compute="master"), device)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-9, atol=0)
