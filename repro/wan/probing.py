"""What suites have ranks do (`repro.wan.launch`): shapes of the sweep, and whole steps of the trainer.

The functions take and return what JSON holds. A model stays with the ranks until another one is asked for.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from repro.adaln import build
from repro.balance.models import MODELS
from repro.balance.types import MicroBatch, Sync
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.measure import stack_time
from repro.wan.config import WanConfig
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Checkpointing, Compute, Parallelism, World
from repro.wan.run import make_engine
from repro.wan.samples import FlowLosses
from repro.wan.sweep import Sweep
from repro.wan.synthetic import SyntheticSamples

WARM_UP = 2
"""Steps of the trainer that do not count: kernels are picked and compiled, AdamW makes its moments."""

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Setting:
    """A model on its ranks. layers: blocks. compiled: each of them by Inductor. checkpointing: of `Parallelism`."""

    model: str
    layers: int
    adaln: str
    sync: str = "micro_batch"
    compiled: bool = False
    checkpointing: str = "full"

    def engine(self, world: World, corpus: Corpus | None = None) -> Engine:
        """bf16 on GPUs; corpus: what its steps are of, None where losses are given with every pass.

        Raises BuildError as `require_kernels`.
        """
        require_kernels(self.adaln, world)
        compute: Compute = "bf16" if world.device.type == "cuda" else "master"
        parallelism = Parallelism(
            cast(Sync, self.sync), cast(Checkpointing, self.checkpointing), self.compiled, compute
        )
        losses = FlowLosses(SyntheticSamples(corpus or _one_shape((1, 16, 16), 1)), FlowMatching(), world.device)
        config = WanConfig.preset(self.model, self.layers)
        return make_engine(config, self.adaln, losses, parallelism, OptimizerSettings(), world)


_sweep: tuple[Setting, Sweep] | None = None

ON_FREE: list[Callable[[], None]] = []
"""What else is to be dropped before another model takes the memory."""


def require_kernels(adaln: str, world: World) -> None:
    """Raise BuildError where `fused` would run as plain tensor operations on a GPU: that is not what is to be timed."""
    if adaln == "fused" and world.device.type == "cuda" and not build.ensure_loaded():
        raise build.BuildError(str(build.failure()))


def shape(world: World, *, frames_height_width: Triple, batch: int, **setting: Any) -> dict[str, Any]:
    """Forward and backward of `batch` samples of a shape on every rank, as `--calibrate` measures it.

    Returns `passes` (s, of the slowest rank), `peak_bytes` (of the fullest, -1 on CPUs) and `fits`.
    """
    sweep = _kept(Setting(**setting), world)
    probe = sweep.probe(Shape(*frames_height_width), batch)
    return {"passes": list(probe.passes), "peak_bytes": probe.peak_bytes, "fits": probe.fits}


def steps(world: World, *, frames_height_width: Triple, batch: int, repeats: int, **setting: Any) -> dict[str, Any]:
    """Whole steps of the trainer, one micro-batch each: samples made, forward, backward, clipping and AdamW.

    Returns `seconds` of each, from an idle device to an idle device, and `peak_bytes` (-1 on CPUs).
    """
    free()
    cuda = world.device.type == "cuda"
    corpus = _one_shape(frames_height_width, world.size * batch)
    engine = Setting(**setting).engine(world, corpus)
    ids = tuple(range(world.rank * batch, (world.rank + 1) * batch))
    micro_batch = MicroBatch(Shape(*frames_height_width), ids, (1 / corpus.samples,) * batch)
    tokens = [int(corpus.tokens[0])]
    seconds, peak = [], -1
    for step in range(WARM_UP + repeats):
        began = time.perf_counter()
        result = engine.step(step, [micro_batch], tokens)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        peak = max(r.peak_bytes for r in result.ranks)
    del engine
    free()
    return {"seconds": seconds[WARM_UP:], "peak_bytes": peak}


def stack(
    world: World, *, model: str, layers: int, adaln: str, batch: int, tokens: int, repeats: int
) -> dict[str, list[float]]:
    """Forward and backward of a plain block stack (`repro.measure.block_stack`) on each rank's device.

    Returns `seconds` of each pass, of the first rank.
    """
    free()
    sample = stack_time.measure_stack(
        MODELS[model], layers, adaln, batch, tokens, world.device, seconds=0.0, repeats=(repeats, repeats)
    )
    stack_time.free()
    return {"seconds": [ms / 1e3 for ms in sample.milliseconds]}


def free() -> None:
    """Drop the kept models and their memory."""
    global _sweep
    for drop in ON_FREE:
        drop()
    if _sweep is not None:
        _sweep[1].close()
    _sweep = None
    gc.collect()  # hooks refer to modules in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _kept(setting: Setting, world: World) -> Sweep:
    global _sweep
    if _sweep is None or _sweep[0] != setting:
        free()
        _sweep = setting, Sweep(lambda: setting.engine(world), world)
    return _sweep[1]


def _one_shape(frames_height_width: Triple, samples: int) -> Corpus:
    of = Shape(*frames_height_width)
    tokens = np.array([Tokenizer().tokens(of)], dtype=np.int64)
    return Corpus("one-shape", "made up", (of,), tokens, np.zeros(samples, dtype=np.int32))
