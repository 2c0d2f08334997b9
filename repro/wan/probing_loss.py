"""What suites have ranks do (`repro.wan.launch`) to compare loss curves: short runs of the trainer's engine.

One rank takes the micro-batches of all ranks of a schedule, one after the other: the gradient is the same sum over the
same samples, so what a policy does to training shows on one GPU. Samples stay in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from repro.balance.models import ModelSize
from repro.balance.schedule import Layout
from repro.balance.types import MicroBatch, Weighting
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan import batching, haar, make_corpus, probing
from repro.wan.batching import BatchLimits
from repro.wan.config import WanConfig
from repro.wan.engine import OptimizerSettings
from repro.wan.moving_shapes import MovingShapes
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Compute, Parallelism, World
from repro.wan.pictures import Source
from repro.wan.run import make_engine
from repro.wan.samples import FlowLosses, Samples, word_embeddings

TEXT_TOKENS = 8
"""Captions are a few words; the 512 tokens of the trainer would be padding."""
VALIDATION_DRAWS = 4
WARM_UP_STEPS = 10
_HELD_OUT = 1 << 20
"""Epoch of the noise that held-out samples are asked with: none that is trained on."""


@dataclass(frozen=True)
class HeldSamples:
    """Samples in memory (`repro.wan.samples.SampleSource`). latents: [16, T, H, W] of each. text: [8, 4096] of each."""

    corpus: Corpus
    latents: tuple[Tensor, ...]
    text: tuple[Tensor, ...]

    def fetch(self, shape: Shape, sample_ids: Sequence[int], device: torch.device | str) -> Samples:
        """The samples of these ids, on `device`."""
        latents, text = (torch.stack([of[i] for i in sample_ids]).to(device) for of in (self.latents, self.text))
        return Samples(latents, text)


def train(
    world: World,
    *,
    size: dict[str, Any],
    corpus: str,
    mix: Sequence[tuple[tuple[int, int, int], float]],
    samples: int,
    held_out: int,
    epochs: int,
    policy: str,
    adaln: str,
    weighting: str,
    seed: int,
    ranks: int,
    token_budget: int,
    m_mem: int,
    p: float,
    lr: float,
    bins: int,
) -> dict[str, Any]:
    """Train from scratch for whole epochs, on the schedule of `ranks` ranks with one micro-batch a step each.

    The learning rate warms up and then falls as half a cosine of the samples seen, to a hundredth.

    corpus: `real-small` or `moving-shapes`. mix: shapes with shares of the samples. Noise, weights and order of samples
    follow from `seed`; held-out samples, and the questions they pose, are the same for all.
    p: exponent of the paper's rule, which FLOPs of so short samples, mostly of their text, do not give.
    Returns `curve`, the mean training loss of each of `bins` equal parts of the samples seen; `before` and `after`, the
    loss of held-out samples; `steps`.
    """
    probing.free()
    probing.require_kernels(adaln, world)
    own = ModelSize(**size)
    shares = tuple((Shape(*shape), share) for shape, share in mix)
    source = _samples(corpus, shares, samples, 0)
    validation = _samples(corpus, shares, held_out, 1)
    compute: Compute = "bf16" if world.device.type == "cuda" else "master"
    losses = _Recording(FlowLosses(source, FlowMatching(seed=seed), world.device))
    parallelism = Parallelism("micro_batch", "none", False, compute)
    settings = OptimizerSettings(lr=lr, warmup=WARM_UP_STEPS)
    engine = make_engine(WanConfig(own), adaln, losses, parallelism, settings, world, seed)
    costs = batching.flop_costs(own, source.corpus, "policies compare costs")
    chosen = batching.make_policy(policy, costs, source.corpus, BatchLimits(m_mem, token_budget, p=p))
    layout = Layout(ranks, m_mem, 1, "micro_batch", "as_published")
    before = _held_out_loss(engine.model, validation, world)
    step, seen, total = 0, 0, epochs * source.corpus.samples
    for epoch in range(epochs):
        schedule = chosen.schedule(source.corpus, layout, seed, epoch)
        for t in range(schedule.steps):
            of_ranks = schedule.step(t, cast(Weighting, weighting)).ranks
            micro_batches = [m for slot in zip(*of_ranks, strict=True) for m in slot if any(m.weights)]
            tokens = [Tokenizer().tokens(m.shape) for m in micro_batches]
            seen += int(schedule.samples_of_step[t])
            # Of samples and not of steps, which policies have different numbers of.
            engine.settings = replace(settings, lr=lr * max(0.01, 0.5 + 0.5 * math.cos(math.pi * seen / total)))
            engine.step(step, micro_batches, tokens, epoch)
            step += 1
    after = _held_out_loss(engine.model, validation, world)
    return {"curve": losses.curve(bins), "before": before, "after": after, "steps": step}


@functools.lru_cache(maxsize=4)
def _samples(corpus: str, mix: tuple[tuple[Shape, float], ...], samples: int, seed: int) -> HeldSamples:
    """Cut, encoded and captioned; a function of the arguments. Raises ModuleNotFoundError."""
    procedural: list[Source] = [MovingShapes()]
    sources = procedural if corpus == "moving-shapes" else make_corpus.load_sources()
    counts = make_corpus.counts(dict(mix), samples)
    shapes = tuple(counts)
    bucket_of = np.repeat(np.arange(len(shapes), dtype=np.int32), list(counts.values()))
    latents, text = [], []
    for i, k in enumerate(bucket_of):
        rng = np.random.default_rng([seed, samples, i])
        shape = shapes[k]
        fitting = [s for s in sources if s.longest() >= shape.frames]
        clip, caption = fitting[rng.integers(len(fitting))].cut(make_corpus.picture_size(shape), rng)
        latents.append(torch.from_numpy(haar.encode(clip)))
        words = word_embeddings(caption.split()[:TEXT_TOKENS])
        text.append(nn.functional.pad(words, (0, 0, 0, TEXT_TOKENS - words.shape[0])))
    tokens = np.array([Tokenizer().tokens(s) for s in shapes], dtype=np.int64)
    return HeldSamples(Corpus(corpus, "cut on the fly", shapes, tokens, bucket_of), tuple(latents), tuple(text))


class _Recording:
    """Losses that remember themselves, in the order in which samples are trained on."""

    def __init__(self, losses: FlowLosses) -> None:
        self._losses, self._seen = losses, list[Tensor]()

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, epoch: int) -> Tensor:
        found = self._losses(model, micro_batch, epoch)
        self._seen.append(found.detach())
        return found

    def curve(self, bins: int) -> list[float]:
        """Mean loss of each of `bins` equal parts of the samples seen."""
        parts = np.array_split(torch.cat(self._seen).double().cpu().numpy(), bins)
        return [float(part.mean()) for part in parts]


@torch.no_grad()
def _held_out_loss(model: nn.Module, samples: HeldSamples, world: World) -> float:
    """Mean loss over samples and draws of noise; the same questions whatever was trained."""
    losses, flow = [], FlowMatching()
    for k, shape in enumerate(samples.corpus.shapes):
        ids = np.flatnonzero(samples.corpus.bucket_of == k).tolist()
        fetched = samples.fetch(shape, ids, world.device)
        for draw in range(VALIDATION_DRAWS):
            losses.append(flow.losses(model, fetched.latents, fetched.text, ids, _HELD_OUT + draw))
    return float(torch.cat(losses).double().mean())
