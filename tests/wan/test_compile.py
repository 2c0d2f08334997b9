"""Compiled parts of the trainer over many shapes: how often they compile, and that nothing falls back to eager."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from repro.balance.models import ModelSize
from repro.balance.types import MicroBatch
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from repro.wan.config import WanConfig
from repro.wan.engine import Engine, OptimizerSettings
from repro.wan.objective import FlowMatching
from repro.wan.parallel import Parallelism, join, leave
from repro.wan.run import make_engine
from repro.wan.samples import FlowLosses
from repro.wan.synthetic import SyntheticSamples

SHAPES = tuple(Shape(f, 32, 32 * w) for f in (1, 5, 9) for w in (1, 3))
BATCHES = (1, 3)


@pytest.fixture
def compiles(monkeypatch):
    """Counts what Dynamo hands to its backend, which here runs it as it is: no C++ compiler is waited for."""
    counted = []

    def backend(graph, inputs):
        counted.append([list(i.shape) if isinstance(i, torch.Tensor) else i for i in inputs])
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, **{**options, "backend": backend}))
    torch._dynamo.reset()
    yield counted
    torch._dynamo.reset()


def engine(adaln: str, compiled: bool) -> Engine:
    torch.manual_seed(0)
    world = join("cpu")
    tokens = np.array([Tokenizer().tokens(s) for s in SHAPES], dtype=np.int64)
    bucket = np.repeat(np.arange(len(SHAPES), dtype=np.int32), max(BATCHES))
    losses = FlowLosses(SyntheticSamples(Corpus("many", "test", SHAPES, tokens, bucket)), FlowMatching(), world.device)
    config = WanConfig(ModelSize("small", dim=24, ffn=32, heads=2, layers=2))
    parallelism = Parallelism(checkpointing="full", compile=compiled, compute="master")
    made = make_engine(config, adaln, losses, parallelism, OptimizerSettings(), world)
    torch.nn.init.normal_(made.model.head.head.weight.to_local(), std=0.1)
    return made


def gradients(subject: Engine) -> list[torch.Tensor]:
    """Losses and gradient, in one vector, of every shape and batch."""
    found = []
    for bucket, shape in enumerate(SHAPES):
        for batch in BATCHES:
            ids = tuple(range(bucket * max(BATCHES), bucket * max(BATCHES) + batch))
            (losses,) = subject.gradients([MicroBatch(shape, ids, (1 / batch,) * batch)])
            gradient = torch.cat([p.grad.to_local().flatten() for p in subject.model.parameters()])
            subject.optimizer.zero_grad()
            found.append(torch.cat((losses, gradient)))
    return found


@functools.cache
def expected() -> list[torch.Tensor]:
    return gradients(engine("eager", False))


def test_compiled_blocks_serve_every_shape_with_two_versions(compiles):
    try:
        # The same operations, in the same order.
        torch.testing.assert_close(gradients(engine("eager", True)), expected(), rtol=1e-5, atol=1e-6)
    finally:
        leave()
    assert len(compiles) == 2, "one sample, more samples"


def test_compiled_adaln_is_compiled_for_each_shape_past_dynamo_s_limit(compiles):
    try:
        torch.testing.assert_close(gradients(engine("compile", False)), expected(), rtol=1e-5, atol=1e-6)
    finally:
        leave()
    sizes = {(s[0], s[1]) for inputs in compiles for s in inputs if isinstance(s, list) and len(s) == 3}
    lengths = {Tokenizer().tokens(s) for s in SHAPES}
    assert sizes == {(b, n) for b in BATCHES for n in lengths} and len(sizes) > torch._dynamo.config.recompile_limit
