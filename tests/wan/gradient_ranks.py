"""What each rank does in `test_gradients`: every policy and sync in one process group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from repro.balance import policies
from repro.balance.cost import PowerCost, QuadraticCost, Range
from repro.balance.models import ModelSize
from repro.balance.policies import Policy
from repro.balance.schedule import Layout
from repro.balance.types import MicroBatch, Sync
from repro.corpus.shapes import Corpus
from repro.wan.config import WanConfig
from repro.wan.engine import Engine, OptimizerSettings, SampleLosses
from repro.wan.initialize import clean_name
from repro.wan.model import WanModel
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Parallelism, World, join
from repro.wan.samples import FlowLosses
from repro.wan.synthetic import SyntheticSamples
from tests.wan import standin

M_MEM = 100
FORMS = {torch.float64: 1e-12, torch.float32: 1e-5}


def policy(name: str) -> Policy:
    _range = Range((1, 10_000), 1_000_000)
    common = {"layers": 1, "measured_layers": 1, "range": _range, "source": "test"}
    cost = QuadraticCost(a=1e-4, b=1.0, c=100.0, **common)
    power = PowerCost(a=0.0, b=1.0, p=1.4, **common)
    return policies.make(name, m_mem=M_MEM, cost=cost, m_comp=2 * 36**power.p, p=power.p, quadratic=36.0)


@dataclass(frozen=True)
class Subject:
    """A model and the losses of its samples."""

    make: Callable[[torch.dtype], nn.Module]
    losses: SampleLosses
    corpus: Corpus

    def engine(self, world: World, dtype: torch.dtype, parallelism: Parallelism) -> Engine:
        return Engine(self.make(dtype), self.losses, parallelism, OptimizerSettings(warmup=0), world)


def small() -> Subject:
    return Subject(standin.make, standin.losses, standin.corpus(40))


def wan(device: str = "cpu") -> Subject:
    """Wan's own model, objective and made-up samples; a trained head, since at first it passes no gradient on."""

    def make(dtype: torch.dtype) -> nn.Module:
        model = WanModel(WanConfig(ModelSize("small", dim=24, ffn=32, heads=2, layers=2)))
        torch.nn.init.normal_(model.head.head.weight, std=0.1, generator=torch.Generator().manual_seed(2))
        return model.to(dtype)

    corpus = standin.corpus(40)
    return Subject(make, FlowLosses(SyntheticSamples(corpus), FlowMatching(), torch.device(device)), corpus)


def reference(subject: Subject, sample_ids: list[int], dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradient of the mean loss over samples, one at a time, in one process without FSDP."""
    model, corpus = subject.make(dtype), subject.corpus
    for i in sample_ids:
        one = MicroBatch(corpus.shapes[corpus.bucket_of[i]], (i,), (1.0,))
        (subject.losses(model, one, 0).sum() / len(sample_ids)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def worst(engine: Engine, expected: dict[str, Tensor]) -> float:
    """Largest relative error (of norms) over parameters."""
    errors = []
    for name, p in engine.model.named_parameters():
        whole = p.grad.full_tensor()
        want = expected[clean_name(name)]
        errors.append(((whole - want).norm() / want.norm()).item())
    return max(errors)


def every_policy(subject: Subject, names: tuple[str, ...], syncs: tuple[Sync, ...]) -> None:
    """Steps 0 and the last (the one with fillers) under every policy, sync and dtype."""
    world, corpus = join("cpu"), subject.corpus
    for dtype, bar in FORMS.items():
        for sync in syncs:
            checkpointing = "full" if sync == "step" else "selective"
            under_test = subject.engine(world, dtype, Parallelism(sync, checkpointing, compute="master"))
            for name in names:
                schedule = policy(name).schedule(corpus, Layout(world.size, M_MEM, micro_batches=2, sync=sync))
                for step in (0, schedule.steps - 1):
                    whole = schedule.step(step)
                    ids = [i for rank in whole.ranks for m in rank if any(m.weights) for i in m.sample_ids]
                    under_test.gradients(whole.ranks[world.rank])
                    error = worst(under_test, reference(subject, ids, dtype))
                    under_test.optimizer.zero_grad()
                    assert error <= bar, f"{name}, sync={sync}, {dtype}, step {step} of {schedule.steps}: {error:.1e}"


def stand_in(names: tuple[str, ...], syncs: tuple[Sync, ...]) -> None:
    every_policy(small(), names, syncs)


def wan_model(names: tuple[str, ...], syncs: tuple[Sync, ...]) -> None:
    every_policy(wan(), names, syncs)


def mixed_shapes() -> None:
    """Ranks with different shapes and a filler in one step; batch_mean is another gradient and must differ."""
    world, subject = join("cpu"), small()
    schedule = policy("equal_token").schedule(subject.corpus, Layout(world.size, M_MEM, micro_batches=2))
    shapes = [{m.shape for rank in schedule.step(t).ranks for m in rank} for t in range(schedule.steps)]
    step = max(range(schedule.steps), key=lambda t: len(shapes[t]))
    assert len(shapes[step]) > 1
    ids = [i for rank in schedule.step(step).ranks for m in rank if any(m.weights) for i in m.sample_ids]
    under_test = subject.engine(world, torch.float64, Parallelism(checkpointing="none", compute="master"))
    under_test.gradients(schedule.step(step, "batch_mean").ranks[world.rank])
    assert worst(under_test, reference(subject, ids, torch.float64)) > 1e-3


def on_gpus() -> None:
    """Wan on GPUs has the gradient of one process on a CPU, in fp32 and, as far as it goes, in bf16.

    Bars: fp32, 1e-3, for kernels and normals that differ in their last bits; bf16, 5% of the whole gradient's norm,
    for 8 bits of mantissa through two blocks and back.
    """
    world, subject = join("cuda"), wan("cuda")
    cpu = wan()
    for sync, checkpointing in (("micro_batch", "full"), ("step", "selective")):
        schedule = policy("balanced").schedule(subject.corpus, Layout(world.size, M_MEM, micro_batches=2, sync=sync))
        whole = schedule.step(0)
        expected = reference(cpu, [i for rank in whole.ranks for m in rank for i in m.sample_ids], torch.float32)
        for compute, bar in (("master", 1e-3), ("bf16", 5e-2)):
            under_test = subject.engine(world, torch.float32, Parallelism(sync, checkpointing, compute=compute))
            under_test.gradients(whole.ranks[world.rank])
            pairs = [
                (p.grad.full_tensor().cpu().flatten(), expected[clean_name(name)].flatten())
                for name, p in under_test.model.named_parameters()
            ]
            got, want = (torch.cat(side) for side in zip(*pairs, strict=True))
            error = ((got - want).norm() / want.norm()).item()
            assert error <= bar, f"sync={sync}, {compute}: {error:.1e}"
