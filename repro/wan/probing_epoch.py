"""What suites have ranks do (`repro.wan.launch`) with a whole epoch: its steps, and among them its shapes' solo times.

Solo times are those of a shape that all ranks take at once, so that nobody waits for anybody. Taken on the engine that
takes the steps, they are what a simulator can be held against. Functions take and return what JSON holds; an engine
stays with the ranks until another one is asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan import probing
from repro.wan.engine import Engine, StepResult
from repro.wan.objective import FlowMatching
from repro.wan.parallel import World
from repro.wan.probing import Setting, Triple
from repro.wan.samples import FlowLosses
from repro.wan.synthetic import SyntheticSamples

REPEATS = 2
"""Passes of a shape outside an epoch, after one that makes workspaces and grows the allocator's pool."""
UPDATES = 4
"""Whole steps from which the time of an update is taken, after one that makes the optimizer's state."""


@dataclass
class Kept:
    """An engine, the (shape, batch) that it has run, and what a step takes beside its passes."""

    setting: Setting
    engine: Engine
    warm: set[tuple[Shape, int]] = field(default_factory=set)
    update: list[float] = field(default_factory=list)
    steps: int = 0


_kept: Kept | None = None


def solo_times(world: World, *, setting: dict[str, Any], shapes: Sequence[tuple[Triple, int]]) -> dict[str, Any]:
    """Solo times of (frames, height, width), batch.

    Returns `passes`, of each shape the seconds of every counted forward and backward pass on the slowest rank.
    """
    kept = keep(Setting(**setting), world)
    found = []
    for frames_height_width, batch in shapes:
        shape = Shape(*frames_height_width)
        _warm(kept, world, shape, batch)
        found.append([_pass(kept, world, shape, batch) for _ in range(REPEATS)])
    return {"passes": found}


def epoch(
    world: World,
    *,
    setting: dict[str, Any],
    shapes: Sequence[Triple],
    bucket_of: Sequence[int],
    solo: Sequence[tuple[int, int, int]],
    steps: Sequence[Sequence[Sequence[tuple[int, Sequence[int], Sequence[float]]]]],
) -> dict[str, Any]:
    """The trainer's optimizer steps of a schedule, and solo times of its shapes.

    On two H200s samples of 46,800 tokens took 5% longer in steps than in passes before the steps, and 6% less than in
    passes after them, with GPUs at their power limit throughout. So every shape is run before the first step, that
    nothing is new to the steps, and its counted passes are spread among them.

    shapes: of the corpus' buckets. bucket_of: [N]. solo: (bucket, batch, passes) to measure. steps: [T][R][M] of
    (bucket, sample ids, weights). Returns `passes` as `solo_times` does; `update`, what steps take beside the passes of
    their micro-batches (clipping, AdamW, what ranks tell each other), s; `wall` [T], seconds of the slowest rank,
    device idle at both ends; `seconds` and `wait` [T][R], a rank's forward, backward and clipping, and its part of that
    spent waiting for others; `peak_bytes` [T][R], -1 on CPUs.
    """
    kept = keep(Setting(**setting), world)
    buckets = tuple(Shape(*s) for s in shapes)
    for k, batch, _ in solo:
        _warm(kept, world, buckets[k], batch)
    if not kept.update:  # on many samples of few tokens, behind whose passes the host can hide
        k, batch, _ = max(solo, key=lambda cell: cell[1])
        kept.update = _updates(kept, world, buckets[k], batch)
    samples = SyntheticSamples(_corpus(buckets, bucket_of))
    kept.engine.losses = FlowLosses(samples, FlowMatching(), world.device)
    walls: list[float] = []
    ranks = []
    passes: list[list[float]] = [[] for _ in solo]
    among = in_rounds([count for *_, count in solo])
    for t, of_ranks in enumerate(steps):
        own = [MicroBatch(buckets[k], tuple(ids), tuple(weights)) for k, ids, weights in of_ranks[world.rank]]
        wall, result = step(kept, world, own)
        walls.append(wall)
        ranks.append(result.ranks)
        for i in among[t * len(among) // len(steps) : (t + 1) * len(among) // len(steps)]:
            k, batch, _ = solo[i]
            passes[i].append(_pass(kept, world, buckets[k], batch))
    return {
        "passes": passes,
        "update": kept.update,
        "wall": slowest(walls),
        "seconds": [[r.seconds for r in of_step] for of_step in ranks],
        "wait": [[r.wait_seconds for r in of_step] for of_step in ranks],
        "peak_bytes": [[r.peak_bytes for r in of_step] for of_step in ranks],
    }


def keep(setting: Setting, world: World) -> Kept:
    """The engine of this setting, made anew unless it is the one that the ranks hold."""
    global _kept
    if _kept is None or _kept.setting != setting:
        probing.free()
        _kept = Kept(setting, setting.engine(world))
    return _kept


def _drop() -> None:
    global _kept
    _kept = None


probing.ON_FREE.append(_drop)


def in_rounds(counts: Sequence[int]) -> list[int]:
    """Index i counts[i] times, in rounds: all that are left once, then again."""
    return [i for r in range(max(counts, default=0)) for i, count in enumerate(counts) if r < count]


def _warm(kept: Kept, world: World, shape: Shape, batch: int) -> None:
    if (shape, batch) not in kept.warm:
        _pass(kept, world, shape, batch)
        kept.warm.add((shape, batch))


def _pass(kept: Kept, world: World, shape: Shape, batch: int) -> float:
    """Seconds of one forward and backward pass of the slowest rank."""
    losses, micro_batch = alone(world, shape, batch)
    slowest([0.0])  # ranks start together
    kept.engine.clock.start()
    kept.engine.gradients([micro_batch], losses=losses)
    took = kept.engine.clock.stop()[0]
    kept.engine.optimizer.zero_grad()
    return slowest([took])[0]


def _updates(kept: Kept, world: World, shape: Shape, batch: int) -> list[float]:
    """Seconds of whole steps of one micro-batch, less its solo time."""
    losses, micro_batch = alone(world, shape, batch)
    kept.engine.losses = losses
    took = [step(kept, world, [micro_batch])[0] for _ in range(1 + UPDATES)]
    passes = statistics.median(_pass(kept, world, shape, batch) for _ in range(REPEATS))
    return [max(0.0, wall - passes) for wall in slowest(took)[1:]]


def step(kept: Kept, world: World, micro_batches: Sequence[MicroBatch]) -> tuple[float, StepResult]:
    """One optimizer step, from an idle device to an idle device: this rank's seconds, and what all ranks did."""
    tokens = [Tokenizer().tokens(m.shape) for m in micro_batches]
    _synchronize(world)
    began = time.perf_counter()
    result = kept.engine.step(kept.steps, micro_batches, tokens)
    _synchronize(world)
    kept.steps += 1
    return time.perf_counter() - began, result


def alone(world: World, shape: Shape, batch: int) -> tuple[FlowLosses, MicroBatch]:
    """Made-up samples of one shape, and the micro-batch of all of them."""
    losses = FlowLosses(SyntheticSamples(_corpus((shape,), [0] * batch)), FlowMatching(), world.device)
    return losses, MicroBatch(shape, tuple(range(batch)), (1 / (batch * world.size),) * batch)


def _corpus(shapes: tuple[Shape, ...], bucket_of: Sequence[int]) -> Corpus:
    tokens = np.array([Tokenizer().tokens(s) for s in shapes], dtype=np.int64)
    return Corpus("probed", "made up", shapes, tokens, np.array(bucket_of, dtype=np.int32))


def _synchronize(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def slowest(seconds: list[float]) -> list[float]:
    """Each value's maximum over ranks, which wait for each other here."""
    tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(v) for v in tensor.tolist()]
