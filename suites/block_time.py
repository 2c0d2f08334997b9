"""Step time and memory of plain Wan 2.1 blocks over batch size and sequence length, at 1.3B and 14B width.

Every cost model, policy and simulation stands on these rows. Steps simulated from them also say what B1 and B2 ask:
with what does the step time of equal-token batches go, their tokens or the square of the sequence length?

Columns: model, layers (blocks measured, fewer than the model has), adaln (eager, wan: formulas of
`repro.adaln.reference`; fused: `repro.adaln.layer_norm_modulate`), batch, tokens (of one sample). `eager` covers the
whole grid; `fused` and `wan` a part of it, since what sets them apart is memory traffic proportional to batch * tokens.
Metrics: forward_backward (ms), and on a GPU static_memory, held_memory, peak_memory (GB of 10^9 bytes; see
`repro.measure.stack_time.StackSample`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from repro.balance.models import MODELS
from repro.corpus import mixes
from repro.corpus.shapes import Tokenizer
from repro.measure.stats import RESAMPLES, Interval, exact, measured, median_interval, seed_text
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine
    from repro.measure.stack_time import StackSample

NAME = "block_time"
CLAIMS = ("B1", "B2")
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("model", "layers", "adaln", "batch", "tokens")

LAYERS = {"wan-14b": 2, "wan-1.3b": 4, "tiny": 1}
"""Blocks of the main grid: enough to show what checkpointing holds, few enough to sweep in minutes."""

SHOWN = ("wan-14b", "wan-1.3b")

DEEPER = 3
"""Some shapes are measured at this many times the depth, to test that time and memory are linear in it."""

BUDGETS = (48_000, 58_896, 72_000)
"""Tokens a micro-batch: the published baseline's; 1.227 and 1.5 times it (AdaptiveLoad, arXiv 2605.17923, reports that
much more memory in use)."""

BUCKETS = tuple(Tokenizer().tokens(s) for s in mixes.mix("wan-uniform").shapes)
SMALL = (256, 512, 1024)
LONG = (65_536, 75_600)
BEYOND = ((1_560, 96), (32_760, 4))
"""(tokens, batch) of 130,000 to 150,000 tokens, about what fits beside a sharded 14B model in 141 GB."""

FUSED = (512, 1_560, 3_600, 7_800, 14_040, 20_280, 32_760, 46_800)
WAN = (1_560, 7_800, 32_760)

STEPS = 1_000
"""Equal-token steps of a log: its R lies within the interval that simulated steps give to B1 and B2."""

Cell = tuple[str, int, str, int, int]
"""Values of PARAMETERS, in their order."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """The grid, shapes of equal-token steps first in each model, so that a run cut short still serves B1 and B2."""
    if profile == "smoke":
        shapes = ((64, 1), (64, 6), (128, 2), (256, 1), (256, 2), (384, 1), (512, 1))
        cells = [("tiny", LAYERS["tiny"], adaln, b, s) for s, b in shapes for adaln in ("eager", "fused")]
        cells += [("tiny", DEEPER * LAYERS["tiny"], "eager", b, s) for s, b in shapes[:2]]
    elif machine.has_gpu:
        cells = [cell for model in SHOWN for cell in _grid(model)]
    else:
        cells = []  # 14B-wide blocks on a CPU say nothing about training
    return [Case(dict(zip(PARAMETERS, c, strict=True)), _case_seconds(*c) if machine.has_gpu else 0.2) for c in cells]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Forward and backward of one shape: median and bootstrap interval of the iterations, memory exactly."""
    import torch

    from repro.measure import stack_time

    key = case.key
    model, layers, adaln = str(key["model"]), int(key["layers"]), str(key["adaln"])
    batch, tokens = int(key["batch"]), int(key["tokens"])
    seconds, repeats = (0.0, (3, 3)) if model == "tiny" else (1.0, (4, 12))
    device = torch.device("cuda" if machine.has_gpu else "cpu")
    try:
        sample = stack_time.measure_stack(MODELS[model], layers, adaln, batch, tokens, device, seconds, repeats)
    except torch.OutOfMemoryError as e:
        reason = f"{layers} blocks of {model} over {batch} x {tokens} tokens do not fit: {str(e).splitlines()[0]}"
    else:
        interval = median_interval(sample.milliseconds, seed_text(NAME, key))
        return [measured("forward_backward", "ms", interval, sample.milliseconds), *_memory(sample)]
    # Outside the handler: the exception's traceback holds the tensors that are to be freed.
    stack_time.free()
    raise CaseSkipped(reason)


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """B1 and B2 from the 14B-wide rows; the 1.3B-wide figure stands in the note.

    Simulated: of the steps only the times of their shapes were measured.
    """
    found = {model: replay(rows, model) for model in SHOWN}
    result = []
    for claim, index, what in (("B1", 0, "total tokens"), ("B2", 1, "S squared")):
        if found["wan-14b"] is None:
            continue
        r = found["wan-14b"][index]
        other = "" if found["wan-1.3b"] is None else f"; 1.3B-wide blocks: {found['wan-1.3b'][index].value:.2f}"
        result.append(
            Evidence(
                claim,
                r.value,
                r.low,
                r.high,
                "simulated",
                note=f"Pearson R of step time and {what} over equal-token steps ({mixes.TOKEN_BUDGET:,} tokens) drawn "
                "evenly from the buckets of wan-uniform; times measured on one GPU with 14B-wide blocks, no "
                f"communication; the interval is that of logs of {STEPS:,} steps, a number of ours{other}",
            )
        )
    return result


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device time per token against sequence length, and step time of equal-token steps; then all devices."""
    from suites import _block_figures

    return _block_figures.draw(rows)


def times(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of step time with numeric parameters: `value` in ms, plus `device` where the rows have it."""
    table = rows[(rows["suite"] == NAME) & (rows["metric"] == "forward_backward")].copy()
    for column in ("layers", "batch", "tokens"):
        table[column] = table[column].astype(int)
    return table


def equal_token_times(rows: pd.DataFrame, model: str) -> pd.DataFrame | None:
    """Batch, tokens and measured ms of each bucket's equal-token micro-batch; None where one was not measured."""
    table = times(rows)
    table = table[(table["model"] == model) & (table["adaln"] == "eager") & (table["layers"] == LAYERS[model])]
    found = table.set_index(["batch", "tokens"])["value"]
    wanted = [(*_batches(s, BUDGETS[:1]), s) for s in BUCKETS]
    return found.loc[wanted].reset_index() if set(wanted) <= set(found.index) else None


def replay(rows: pd.DataFrame, model: str) -> tuple[Interval, Interval] | None:
    """Pearson R of step time with total tokens and with S squared, over equal-token steps of wan-uniform.

    A step is one rank's micro-batch; wan-uniform is even over equal-token micro-batches, so buckets are drawn evenly.
    95% of logs of STEPS steps lie in the interval. None where a bucket was not measured.
    """
    table = equal_token_times(rows, model)
    if table is None:
        return None
    generator = np.random.default_rng(0)
    even = np.ones(len(table), dtype=np.int64)
    logs = generator.multinomial(STEPS, even / len(table), size=RESAMPLES)
    intervals = []
    for x in (table["batch"] * table["tokens"], table["tokens"] ** 2):
        r = _weighted_correlation(np.vstack([even, logs]), x.to_numpy(float), table["value"].to_numpy(float))
        low, high = np.quantile(r[1:], [0.025, 0.975])
        intervals.append(Interval(float(r[0]), float(low), float(high), STEPS))
    return intervals[0], intervals[1]


def _weighted_correlation(
    counts: npt.NDArray[np.int64], x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Pearson R of x and y [K], each pair taken counts [..., K] times."""
    w = counts / counts.sum(axis=-1, keepdims=True)
    dx, dy = x - (w @ x)[..., None], y - (w @ y)[..., None]
    covariance = (w * dx * dy).sum(-1)
    return covariance / np.sqrt((w * dx**2).sum(-1) * (w * dy**2).sum(-1))


def _grid(model: str) -> list[Cell]:
    n, baseline = LAYERS[model], BUDGETS[0]
    budgets = BUDGETS if model == "wan-14b" else BUDGETS[::2]
    fused = [(s, b) for s in FUSED for b in {1, *_batches(s, (baseline,))}]
    fused += [(s, b) for s in FUSED[:4] for b in _batches(s, BUDGETS[2:])]
    wan = [(s, b) for s in WAN for b in {1, *_batches(s, (baseline,))}]
    eager = [(s, b) for s in BUCKETS for b in _batches(s, budgets)] + fused + wan
    core = [(*at, adaln) for adaln, shapes in (("eager", eager), ("fused", fused), ("wan", wan)) for at in shapes]
    rest = [(s, b, "eager") for s in (*BUCKETS, *LONG) for b in _powers(s)]
    rest += [(s, b, "eager") for s in SMALL for b in (*_powers(s), *_batches(s, BUDGETS[2:]))]
    if model == "wan-14b":
        rest += [(s, b, "eager") for s, b in BEYOND]
    # The implementations of one shape follow each other, so that slow drifts of the clocks cancel in their ratio.
    ordered = [*sorted(set(core)), *sorted(set(rest) - set(core))]
    cells = [(model, n, adaln, b, s) for s, b, adaln in ordered]
    return cells + [(model, DEEPER * n, "eager", b, s) for s, b in ((1_560, 1), (7_800, 6))]


def _batches(tokens: int, budgets: Iterable[int]) -> list[int]:
    """Batch sizes that fill the budgets, at least 1."""
    return sorted({max(1, budget // tokens) for budget in budgets})


def _powers(tokens: int) -> list[int]:
    """1, 8, 64, ... samples of up to 12,000 tokens together: below, time is launches and the text's share."""
    return [8**k for k in range(4) if k == 0 or 8**k * tokens <= 12_000]


def _case_seconds(model: str, layers: int, adaln: str, batch: int, tokens: int) -> float:
    """Estimate on an H200: 4x forward FLOPs (checkpointing) at 500 TFLOP/s, at least 7 ms a block for launches."""
    step = max(4 * layers * float(MODELS[model].forward_flops(batch, tokens)) / 500e12, 7e-3 * layers)
    return 0.5 + step * (1 + (step < 0.3) + min(max(math.ceil(1 / step), 4), 12))


def _memory(sample: StackSample) -> list[Measurement]:
    sizes = {"static": sample.static_bytes, "held": sample.held_bytes, "peak": sample.peak_bytes}
    return [exact(f"{name}_memory", "GB", size / 1e9) for name, size in sizes.items() if size is not None]
