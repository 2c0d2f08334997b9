"""Bad input to what users import: the op, layouts and the sampler, costs and their fit, limits, shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from repro.adaln import layer_norm_modulate
from repro.balance import fit, limits, policies
from repro.balance.cost import PowerCost, Range, TableCost, reference_wan14b
from repro.balance.policies import EqualToken
from repro.balance.sampler import ScheduleSampler
from repro.balance.schedule import Layout
from repro.corpus.shapes import Corpus, Shape, Tokenizer
from tests.faults.cases import Case

OP, SAMPLER, FIT, LAYOUT = "the op", "the sampler", "cost fit", "policies and layouts"


def calling(door: str, kind: str, name: str, told: str, call: Callable[[], object]) -> Case:
    """A call that needs no files."""
    return Case(door, kind, name, lambda _: call, told)


def op(kind: str, name: str, told: str, **changed: Any) -> Case:
    """The op with one argument changed."""
    given = {"x": torch.ones(2, 3, 8), "shift": torch.zeros(2, 8), "scale": torch.zeros(2, 8), **changed}
    return calling(OP, kind, name, told, lambda: layer_norm_modulate(**given))


OPS = [
    op("missing", "shift is None", "shift must be a torch.Tensor", shift=None),
    op("empty", "no features", "at least one feature", x=torch.ones(2, 3, 0)),
    op("empty", "x without axes", "x must have shape", x=torch.tensor(1.0)),
    op("empty", "shift of nothing", "shift must have", shift=torch.zeros(0)),
    op("malformed", "x of four axes", "x must have shape", x=torch.ones(1, 2, 3, 8)),
    op("malformed", "scale of other features", "scale must have shape", scale=torch.zeros(2, 9)),
    op("malformed", "scale of other samples", "scale must have shape", scale=torch.zeros(3, 8)),
    op("malformed", "frames that do not divide", "scale must have shape", scale=torch.zeros(2, 2, 1, 8)),
    op("duplicated", "two forms at once", "shift must have the same shape", shift=torch.zeros(2, 3, 8)),
    op("wrong type", "a list", "x must be a torch.Tensor", x=[[1.0] * 8]),
    op("wrong type", "an array", "x must be a torch.Tensor", x=np.ones((2, 3, 8))),
    op("wrong type", "whole numbers", "x must be bfloat16", x=torch.ones(2, 3, 8, dtype=torch.int64)),
    op("wrong type", "complex numbers", "x must be bfloat16", x=torch.ones(2, 3, 8, dtype=torch.complex64)),
    op("wrong type", "truth values", "scale must be", scale=torch.zeros(2, 8, dtype=torch.bool)),
    op("wrong type", "8 bits", "shift must be", shift=torch.zeros(2, 8).to(torch.float8_e4m3fn)),
    op("wrong type", "eps in words", "eps must be a float", eps="small"),
    op("wrong type", "a dtype in words", "out_dtype must be a torch.dtype", out_dtype="bfloat16"),
    op("wrong type", "an output of whole numbers", "out_dtype must be", out_dtype=torch.int8),
    op("wrong type", "an unknown backward", "impl must be", impl="fast"),
    op("wrong type", "another device", "must be on x's device", shift=torch.zeros(2, 8, device="meta")),
    op("NaN", "eps", "eps must be positive", eps=math.nan),
    op("negative", "eps", "eps must be positive", eps=-1e-6),
    op("negative", "eps of zero", "eps must be positive", eps=0.0),
    op("overflow", "eps", "eps must be positive", eps=math.inf),
]

SHAPES = (Shape(1, 256, 256), Shape(17, 256, 256))
TOKENS = np.array([Tokenizer().tokens(s) for s in SHAPES])


def corpus(tokens: Any = TOKENS, buckets: Any = (0, 1, 0, 1)) -> Corpus:
    """Four samples in two buckets, unless told otherwise."""
    return Corpus("some", "test", SHAPES, np.asarray(tokens), np.asarray(buckets, dtype=np.int32))


def sampler(**changed: Any) -> ScheduleSampler:
    """A sampler of two ranks; what is given as a function is made here."""
    given = {"policy": EqualToken(2048), "corpus": corpus, "layout": Layout(2, 2048), "rank": 0, **changed}
    return ScheduleSampler(**{k: v() if callable(v) else v for k, v in given.items()})


def dealing(kind: str, name: str, told: str, **changed: Any) -> Case:
    """A sampler that cannot be made, or whose first use fails."""
    return calling(SAMPLER, kind, name, told, lambda: list(sampler(**changed)))


def state(kind: str, name: str, told: str, **changed: Any) -> Case:
    """A state that a sampler must refuse."""
    return calling(
        SAMPLER, kind, f"state: {name}", told, lambda: sampler().load_state_dict({**sampler().state_dict(0), **changed})
    )


SAMPLERS = [
    dealing("empty", "no samples", "has no samples", corpus=lambda: corpus(buckets=())),
    dealing("negative", "a rank", "rank must be in 0..1", rank=-1),
    dealing("negative", "a bucket", "bucket", corpus=lambda: corpus(buckets=(0, -1, 0, 1))),
    dealing("negative", "tokens", "tokens", corpus=lambda: corpus(tokens=(-256, 1280))),
    dealing("negative", "no tokens", "tokens", corpus=lambda: corpus(tokens=(0, 1280))),
    dealing("negative", "a seed", "seed|non-negative", seed=-1),
    dealing("overflow", "a rank", "rank must be in 0..1", rank=2),
    dealing("overflow", "a bucket", "bucket", corpus=lambda: corpus(buckets=(0, 2, 0, 1))),
    dealing("huge", "a sample", "exceeds the memory limit", layout=Layout(2, 1000)),
    dealing("wrong type", "a weighting", "weighting must be", weighting="heavy"),
    dealing("wrong type", "half a rank", "rank must be", rank=0.5),
    dealing("wrong type", "half a token", "tokens", corpus=lambda: corpus(tokens=(256.5, 1280.0))),
    dealing("NaN", "tokens", "tokens", corpus=lambda: corpus(tokens=(math.nan, 1280.0))),
    state("missing", "no epoch", "epoch of the state must be a whole number, got None", epoch=None),
    state("wrong type", "steps in words", "steps of the state must be a whole number", steps="one"),
    state("wrong type", "a seed that is true", "seed of the state must be a whole number", seed=True),
    state("NaN", "steps", "steps of the state must be a whole number", steps=math.nan),
    state("negative", "steps", "steps of the state must be in 0", steps=-1),
    state("negative", "an epoch", "epoch|non-negative", epoch=-1),
    state("overflow", "steps", "steps of the state must be in 0", steps=10**30),
    state("adversarial", "another schedule", "state is of schedule", schedule="0123456789abcdef"),
    calling(
        SAMPLER, "empty", "state: nothing", "must be a whole number, got None", lambda: sampler().load_state_dict({})
    ),
]


def layout(kind: str, name: str, told: str, **changed: Any) -> Case:
    """A layout that no run can have."""
    return calling(LAYOUT, kind, name, told, lambda: Layout(**{"ranks": 2, "m_mem": 2048, **changed}))


def policy(kind: str, about: str, told: str, **changed: Any) -> Case:
    """A policy that cannot be made, or has no batch size for a bucket."""
    given = {"name": "dual_constraint", "m_mem": 2048, "cost": reference_wan14b(), "m_comp": 1e5, "p": 1.2, **changed}
    return calling(LAYOUT, kind, f"policy: {about}", told, lambda: policies.make(**given).batch_sizes(TOKENS))


LAYOUTS = [
    layout("negative", "no ranks", "ranks must be at least 1", ranks=0),
    layout("negative", "micro-batches", "micro_batches must be at least 1", micro_batches=-1),
    layout("negative", "m_mem", "m_mem must be at least 1", m_mem=-5),
    layout("NaN", "m_mem", "m_mem", m_mem=math.nan),
    layout("wrong type", "half a rank", "ranks", ranks=1.5),
    layout("wrong type", "ranks in words", "ranks", ranks="two"),
    layout("wrong type", "sync", "sync must be", sync="never"),
    layout("wrong type", "protocol", "protocol must be", protocol="fair"),
    layout("adversarial", "as published, of two", "as_published means one", protocol="as_published", micro_batches=2),
    policy("missing", "no m_comp", "needs m_comp and p", m_comp=None),
    policy("missing", "no p", "needs m_comp and p", p=None),
    policy("wrong type", "an unknown name", "fair", name="fair"),
    policy("NaN", "m_comp", "m_comp", m_comp=math.nan),
    policy("NaN", "p", r"\bp\b", p=math.nan),
    policy("negative", "m_comp", "m_comp", m_comp=-1.0),
    policy("negative", "m_mem", "m_mem", m_mem=0),
    policy("overflow", "m_comp", "m_comp", m_comp=math.inf),
    calling(LAYOUT, "empty", "limits: no bucket", "at least one bucket", lambda: limits.choose(_power(), [], 48_000)),
    calling(LAYOUT, "negative", "limits: tokens", "positive", lambda: limits.choose(_power(), [-1, 256], 48_000)),
    calling(
        LAYOUT,
        "huge",
        "limits: a bucket",
        "more than the memory limit",
        lambda: limits.choose(_power(), [10**9], 48_000),
    ),
    calling(
        LAYOUT,
        "wrong type",
        "a shape that does not divide",
        "must be 4k",
        lambda: Tokenizer().tokens(Shape(2, 256, 256)),
    ),
    calling(LAYOUT, "negative", "a shape", "must be 4k", lambda: Tokenizer().tokens(Shape(-3, 256, 256))),
]


def _power() -> PowerCost:
    return PowerCost(a=0.1, b=1.0, p=1.2, layers=1, measured_layers=1, range=Range((256, 10**5), 10**6), source="test")


LENGTHS = np.array([256, 1024, 4096, 8192, 16384, 32768])


def observations(kind: str, name: str, told: str, form: Any = "quadratic", **changed: Any) -> Case:
    """Step times that no cost can be fitted to."""
    given = {
        "batch": np.ones(6, np.int64),
        "tokens": LENGTHS,
        "seconds": LENGTHS / 1e4,
        "layers": 2,
        "measured": np.ones(6, bool),
        "source": "test",
        **changed,
    }
    return calling(FIT, kind, name, told, lambda: fit.fit(form, fit.Observations(**given)))


def rows(kind: str, name: str, told: str, **changed: Any) -> Case:
    """Rows of block_time that no cost can be read from."""
    table = pd.DataFrame(
        {
            "suite": "block_time",
            "metric": "forward_backward",
            "model": "wan-14b",
            "adaln": "eager",
            "layers": 2,
            "batch": 1,
            "tokens": LENGTHS,
            "value": LENGTHS / 10.0,
            "run_id": "r",
        }
    ).assign(**changed)
    return calling(
        FIT, kind, f"rows: {name}", told, lambda: fit.fit("power", fit.observations(table, "wan-14b", "eager"))
    )


def _with(at: int, value: float) -> Any:
    changed = (LENGTHS / 1e4).copy()
    changed[at] = value
    return changed


FITS = [
    observations(
        "empty", "nothing", "at least 5 lengths", **{k: np.empty(0) for k in ("batch", "tokens", "seconds", "measured")}
    ),
    observations("truncated", "fewer times than shapes", "equally long", seconds=LENGTHS[:5] / 1e4),
    observations("duplicated", "one length", "at least 5 lengths", tokens=np.full(6, 256)),
    observations("NaN", "a time", "step times must be positive", seconds=_with(2, math.nan)),
    observations("negative", "a time", "step times must be positive", seconds=_with(2, -1.0)),
    observations("negative", "a time of nothing", "step times must be positive", seconds=_with(2, 0.0)),
    observations("negative", "tokens", "tokens", tokens=np.where(LENGTHS == 256, -256, LENGTHS)),
    observations("negative", "no samples", "batch", batch=np.array([0, 1, 1, 1, 1, 1])),
    observations("negative", "layers", "layers", layers=0),
    observations("overflow", "a time", "finite|positive", seconds=_with(2, math.inf)),
    rows("missing", "another model", "no block_time rows of model", model="wan-2b"),
    rows("missing", "another adaln", "no measured AdaLN 'eager'", adaln="fused"),
    rows("NaN", "a time", "step times must be positive", value=_with(0, math.nan)),
    rows("wrong type", "times in words", "fast", value="fast"),
    observations("wrong type", "a form", "form must be one of", form="cubic"),
    calling(
        FIT,
        "wrong type",
        "half a sample",
        "batch and tokens must be at least 1",
        lambda: reference_wan14b().seconds(0.5, 256),
    ),
    calling(
        FIT,
        "NaN",
        "cost of NaN",
        "batch and tokens must be at least 1",
        lambda: reference_wan14b().seconds(1, math.nan),
    ),
    calling(
        FIT,
        "negative",
        "cost of nothing",
        "batch and tokens must be at least 1",
        lambda: reference_wan14b().seconds(0, 256),
    ),
    calling(
        FIT,
        "overflow",
        "cost of infinity",
        "outside what was measured",
        lambda: reference_wan14b().seconds(1, math.inf),
    ),
    calling(
        FIT, "huge", "cost beyond the range", "outside what was measured", lambda: reference_wan14b().seconds(1, 10**6)
    ),
    calling(FIT, "adversarial", "a table on one line", "span batch and tokens", lambda: _table((1, 1, 1), (1, 2, 3))),
    calling(
        FIT, "duplicated", "a table with a shape twice", "one time for each shape", lambda: _table((1, 1, 2), (5, 5, 6))
    ),
]


def _table(batch: tuple[int, ...], tokens: tuple[int, ...]) -> TableCost:
    about: dict[str, Any] = {"layers": 1, "measured_layers": 1, "range": Range((1, 9), 99), "source": "test"}
    return TableCost(base=_power(), batch=batch, tokens=tokens, measured_seconds=(1.0, 1.0, 1.0), **about)


CASES = [*OPS, *SAMPLERS, *LAYOUTS, *FITS]
