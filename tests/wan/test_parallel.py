"""Layout over ranks: what is refused, what sharding and checkpointing leave unchanged, and what counts as waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from repro.balance.types import MicroBatch
from repro.wan import waiting
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.parallel import Parallelism, WorldError, join, leave, parallelize
from repro.wan.waiting import WaitClock
from tests.wan import parallel_ranks, ranks, standin


@pytest.mark.parametrize("field", ["sync", "checkpointing", "compute"])
def test_settings_name_the_wrong_value(field):
    with pytest.raises(ValueError, match=f"{field} must be one of .*got 'often'"):
        Parallelism(**{field: "often"})


def test_more_ranks_than_gpus_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "9")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(WorldError, match=r"9 ranks .* 8 GPUs.*--nproc-per-node"):
        join("cuda")


def test_a_model_without_blocks_is_refused(monkeypatch):
    with pytest.raises(TypeError, match=r"Linear needs an nn\.ModuleList"):
        parallelize(nn.Linear(2, 2), Parallelism(), None, WaitClock(torch.device("cpu")))


def test_every_form_trains_as_a_plain_loop_does():
    """Sharding, checkpointing and sync change when things are computed, never what; AdamW, clipping, warm-up too."""
    ranks.run(parallel_ranks.every_form, 2)


def test_a_loss_that_is_not_finite_stops_or_skips_on_all_ranks():
    ranks.run(parallel_ranks.non_finite, 2)


def test_a_gradient_that_is_not_finite_stops_or_skips_on_all_ranks():
    ranks.run(parallel_ranks.gradients_not_finite, 2)


def test_fillers_are_no_samples():
    ranks.run(parallel_ranks.fillers_are_no_samples, 2)


def test_ranks_meet_where_they_are_told_to():
    ranks.run(parallel_ranks.exchanges, 2)


def test_a_checkpoint_does_not_bring_its_optimizer_settings_along():
    """Loading one replaces them in the parameter groups; a resumed run says that they changed, so they have to."""
    world, settings = join("cpu"), OptimizerSettings(lr=1e-2, weight_decay=0.5, betas=(0.5, 0.6), warmup=0)
    try:
        after = []
        for loaded in ({}, {"lr": 1.0, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1.0}):
            engine = Engine(standin.make(), standin.losses, Parallelism(compute="master"), settings, world)
            engine.optimizer.param_groups[0].update(loaded)
            for step in range(2):
                engine.step(step, [MicroBatch(standin.SHAPES[0], (step,), (1.0,))], [4])
            after.append([p.full_tensor() for p in engine.model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*after, strict=True))
    finally:
        leave()


class Passing:
    """A clock that moves only where the test lets it."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(waiting.time, "perf_counter", lambda: self.now)

    def take(self, seconds):
        def hook(*_):
            self.now += seconds

        return hook


def test_waits_are_the_gathers_and_the_last_reductions(monkeypatch):
    """Time that passes in the places of FSDP's hooks counts as waiting; time that blocks take does not."""
    passing, clock = Passing(monkeypatch), WaitClock(torch.device("cpu"))
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    clock.before_sharding(blocks)
    for block in blocks:  # as fully_shard does
        block.register_forward_pre_hook(passing.take(1.0), prepend=True)
        block.register_forward_hook(lambda m, a, out: out.register_hook(passing.take(0.5)) and None)
    clock.after_sharding(blocks)
    clock.start()
    passing.now += 4.0
    x = torch.ones(1, 2, requires_grad=True) * 1
    for block in blocks:
        x = block(x)
        passing.now += 8.0
    x.sum().backward()
    passing.now += 0.25  # reductions, before backward() would return
    clock.backward_done()
    assert clock.stop() == (4.0 + 2 * 9.0 + 2 * 0.5 + 0.25, 2 * 1.0 + 2 * 0.5 + 0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
def test_every_form_trains_on_gpus_as_a_plain_loop_does_on_a_cpu(count):
    ranks.run_on_gpus(parallel_ranks.every_form, count, "cuda")
