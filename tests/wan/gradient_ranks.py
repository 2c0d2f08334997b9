"""What each rank does in `test_gradients`: every policy and sync in one process group."""

from __future__ import annotations

import torch
from torch import Tensor

from repro.balance import policies
from repro.balance.cost import PowerCost, QuadraticCost, Range
from repro.balance.policies import Policy
from repro.balance.schedule import Layout
from repro.balance.types import MicroBatch, Sync
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.initialize import clean_name
from repro.wan.parallel import Parallelism, World, join
from tests.wan import standin

M_MEM = 100
FORMS = {torch.float64: 1e-12, torch.float32: 1e-5}


def policy(name: str) -> Policy:
    _range = Range((1, 10_000), 1_000_000)
    common = {"layers": 1, "measured_layers": 1, "range": _range, "source": "test"}
    cost = QuadraticCost(a=1e-4, b=1.0, c=100.0, **common)
    power = PowerCost(a=0.0, b=1.0, p=1.4, **common)
    return policies.make(name, m_mem=M_MEM, cost=cost, m_comp=2 * 36**power.p, p=power.p, quadratic=36.0)


def engine(world: World, dtype: torch.dtype, parallelism: Parallelism) -> Engine:
    return Engine(standin.make(dtype), standin.losses, parallelism, OptimizerSettings(warmup=0), world)


def reference(sample_ids: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradient of the mean loss over samples, one at a time, in one process without FSDP."""
    model, corpus = standin.make(dtype), standin.corpus(40)
    for i in sample_ids:
        one = MicroBatch(corpus.shapes[corpus.bucket_of[i]], (i,), (1.0,))
        (standin.losses(model, one, 0).sum() / len(sample_ids)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def worst(engine: Engine, expected: dict[str, Tensor]) -> float:
    """Largest relative error (of norms) over parameters."""
    errors = []
    for name, p in engine.model.named_parameters():
        whole = p.grad.full_tensor()
        want = expected[clean_name(name)]
        errors.append(((whole - want).norm() / want.norm()).item())
    return max(errors)


def every_policy(names: tuple[str, ...], syncs: tuple[Sync, ...]) -> None:
    """Steps 0 and the last (the one with fillers) under every policy, sync and dtype."""
    world, corpus = join("cpu"), standin.corpus(40)
    for dtype, bar in FORMS.items():
        for sync in syncs:
            checkpointing = "full" if sync == "step" else "selective"
            under_test = engine(world, dtype, Parallelism(sync, checkpointing, compute="master"))
            for name in names:
                schedule = policy(name).schedule(corpus, Layout(world.size, M_MEM, micro_batches=2, sync=sync))
                for step in (0, schedule.steps - 1):
                    whole = schedule.step(step)
                    ids = [i for rank in whole.ranks for m in rank if any(m.weights) for i in m.sample_ids]
                    under_test.gradients(whole.ranks[world.rank])
                    error = worst(under_test, reference(ids, dtype))
                    under_test.optimizer.zero_grad()
                    assert error <= bar, f"{name}, sync={sync}, {dtype}, step {step} of {schedule.steps}: {error:.1e}"


def mixed_shapes() -> None:
    """Ranks with different shapes and a filler in one step; batch_mean is another gradient and must differ."""
    world, corpus = join("cpu"), standin.corpus(40)
    schedule = policy("equal_token").schedule(corpus, Layout(world.size, M_MEM, micro_batches=2))
    shapes = [{m.shape for rank in schedule.step(t).ranks for m in rank} for t in range(schedule.steps)]
    step = max(range(schedule.steps), key=lambda t: len(shapes[t]))
    assert len(shapes[step]) > 1
    ids = [i for rank in schedule.step(step).ranks for m in rank if any(m.weights) for i in m.sample_ids]
    under_test = engine(world, torch.float64, Parallelism(checkpointing="none", compute="master"))
    under_test.gradients(schedule.step(step, "batch_mean").ranks[world.rank])
    assert worst(under_test, reference(ids, torch.float64)) > 1e-3
