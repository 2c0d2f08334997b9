"""Step time and memory of the trainer itself over batch size and sequence length: the sweep that `--calibrate` fits.

Whole Wan models under FSDP, bf16 compute with fp32 master weights and full checkpointing, forward and backward with all
that ranks exchange on the way; no optimizer step. It answers B6 on the live path: does the fitted a + b * B * S^p
predict lengths that it has not seen? `block_time` measures plain blocks, on one GPU.

Columns: model, layers, adaln, ranks (GPUs, each with the same shape), sync (of the trainer), shape (frames x height x
width), batch, tokens (of one sample).
Metrics: fits (1, or 0 where memory ran out; then nothing else), forward_backward (ms, of the slowest rank) and on GPUs
peak_memory (GB of 10^9 bytes, of the fullest rank, as the allocator counts; weights and gradients included, AdamW's
moments not yet made).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions
from repro.balance.fit import Fit, Observations, fit
from repro.balance.models import MODELS
from repro.corpus import mixes
from repro.corpus.shapes import Shape, Tokenizer
from repro.measure.stats import exact, measured, median_interval, seed_text
from repro.suite import Case, Evidence, Figure, Measurement, Profile
from suites import _ranks

if TYPE_CHECKING:
    import pandas as pd

    from repro.measure.machine import Machine

NAME = "shape_sweep"
CLAIMS = ("B6",)
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("model", "layers", "adaln", "ranks", "sync", "shape", "batch", "tokens")

ADALN, SYNC = "fused", "micro_batch"
BUCKETS = mixes.mix("wan-uniform").shapes
NEAR = {Shape(33, 720, 1280)}
"""Buckets a hundredth away from another one's length, which are left to the fit."""
BUDGET, MORE = mixes.TOKEN_BUDGET, assumptions.M_MEM
"""Tokens a micro-batch: the published baseline's, and those that simulations assume to fit."""

WHOLE = 33_000
"""Tokens of a micro-batch of the whole 14B model, sharded over two GPUs; a clip with more goes alone."""

SHALLOW, DEEPER = 4, 8
"""Blocks of the 14B model that one GPU holds with room for activations; two depths show what grows with it."""

SMOKE = tuple(Shape(*s) for s in ((1, 32, 32), (1, 64, 64), (5, 64, 64), (9, 64, 64), (9, 64, 96), (17, 64, 96)))
SHOWN = (("wan-1.3b", MODELS["wan-1.3b"].layers), ("wan-14b", SHALLOW), ("wan-14b", MODELS["wan-14b"].layers))

Cell = tuple[str, int, Shape, int]
"""Model, layers, shape, batch."""


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """The grid, models one after the other and the budget's batches first, on all GPUs that the machine uses."""
    ranks = max(1, machine.gpu_count)
    if profile == "smoke":
        cells = [("tiny", 1, s, b) for s in SMOKE for b in ((1, 2) if s in SMOKE[:2] else (1,))]
    else:
        cells = _grid(ranks) if machine.has_gpu else []  # a CPU's times say nothing about training
    done: set[tuple[str, int]] = set()
    found = []
    for model, layers, shape, batch in cells:
        starts = 0.0 if (model, layers) in done else 3.0 if not machine.has_gpu else 5.0 if done else 15.0
        done.add((model, layers))
        key = (model, layers, ADALN, ranks, SYNC, str(shape), batch, Tokenizer().tokens(shape))
        seconds = _case_seconds(model, layers, batch, int(key[-1])) if machine.has_gpu else 0.2
        found.append(Case(dict(zip(PARAMETERS, key, strict=True)), round(starts + seconds, 1)))
    return found


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """One shape on every rank; where memory runs out that is the result."""
    key = case.key
    asked: dict[str, Any] = {name: key[name] for name in ("model", "layers", "adaln", "sync", "batch")}
    asked["frames_height_width"] = [int(n) for n in str(key["shape"]).split("x")]
    what = f"{key['layers']} layers of {key['model']} on {key['ranks']} ranks"
    skipped = (*_ranks.OUT_OF_MEMORY, "Stranded")  # memory ran out on another rank
    found = _ranks.ask(int(key["ranks"]), "repro.wan.probing:shape", asked, case, machine, what, skipped)
    rows = [exact("fits", "", float(found["fits"]))]
    if found["fits"]:
        passes = 1e3 * np.array(found["passes"])
        rows.append(measured("forward_backward", "ms", median_interval(passes, seed_text(NAME, key)), passes))
        if found["peak_bytes"] >= 0:
            rows.append(exact("peak_memory", "GB", found["peak_bytes"] / 1e9))
    return rows


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """B6 from the power law of the 14B-wide model; other fits stand in the note, the 1.3B one beside what decides."""
    fits = {at: found for at in reversed(SHOWN) if (found := fitted(rows, *at)) is not None}
    if not fits:
        return []
    (model, _), (power, _) = next(iter(fits.items()))
    value, low, high = power.error(power.held_out)
    seen = power.observations
    told = "; ".join(
        f"{model}, {layers} layers: p = {_power(found)}, {found.held_out_mape:.3g}%, with b B S + c B S^2 + d B "
        f"{quadratic.held_out_mape:.3g}%"
        for (model, layers), (found, quadratic) in fits.items()
    )
    note = (
        f"mean absolute error with whole lengths held out, {seen.batch.size} shapes of {seen.tokens.min():,} to "
        f"{seen.tokens.max():,} tokens measured on the trainer's own FSDP path, nothing set by hand. {told}. The same "
        "sweep, fit and batch table are what `python -m repro.train --calibrate` does before it trains"
    )
    runs = len(seen.source.split())
    if runs > 1:
        note += f". Shapes are of {runs} runs, none in two: machines and kernels may differ between them"
    several = any(np.unique(seen.batch[seen.tokens == s]).size > 1 for s in np.unique(seen.tokens))
    if not several:
        note = f"no length in two batch sizes, so that what a batch costs was not tested; {note}"
    longest = max(Tokenizer().tokens(s) for s in BUCKETS)
    if seen.tokens.max() < longest:
        note = f"without the longest bucket ({longest:,} tokens), which errs most; {note}"
    # A sweep that was cut short has the smaller model, one batch a length or no long clips, which err less: it must not
    # decide.
    decides = several and model == assumptions.MODEL and bool(seen.tokens.max() >= longest)
    return [Evidence("B6", value, low, high, "measured", note=note, decides=decides)]


def draw(rows: pd.DataFrame) -> list[Figure]:
    """Time a token against length with the fitted power law, and peak memory against tokens, for each device."""
    figures = [f for device, own in rows.groupby("device", sort=True) for f in _draw_device(str(device), own)]
    return figures + _draw_devices(rows)


def fitted(rows: pd.DataFrame, model: str, layers: int) -> tuple[Fit, Fit] | None:
    """Power law and quadratic of a model at a depth; None where too few shapes were measured."""
    table = _cells(rows, model, layers)
    data = Observations(
        table["batch"].to_numpy(np.int64),
        table["tokens"].to_numpy(np.int64),
        table["forward_backward"].to_numpy(np.float64) / 1e3,
        layers,
        np.ones(len(table), dtype=bool),
        " ".join(sorted(table["run_id"].unique())),
    )
    try:
        return fit("power", data), fit("quadratic", data)
    except ValueError:
        return None


def _cells(rows: pd.DataFrame, model: str, layers: int) -> pd.DataFrame:
    """A row a shape that fits, numeric columns, metrics as columns; on the most ranks that were measured."""
    own = rows[(rows["suite"] == NAME) & (rows["model"] == model) & (rows["layers"].astype(int) == layers)]
    columns = ["run_id", "batch", "tokens"]
    own = own.astype({"batch": int, "tokens": int, "ranks": int})
    own = own[own["ranks"] == own["ranks"].max()]
    wide = own.pivot_table(index=["shape", *columns], columns="metric", values="value").reset_index()
    for metric in ("forward_backward", "peak_memory"):
        if metric not in wide:
            wide[metric] = np.nan
    return wide[wide["forward_backward"].notna()].sort_values(["tokens", "batch"])


def _grid(ranks: int) -> list[Cell]:
    buckets = tuple(s for s in BUCKETS if s not in NEAR)
    cells = [
        *_shapes_of("wan-1.3b", MODELS["wan-1.3b"].layers, buckets, BUDGET),
        *_full("wan-1.3b", MODELS["wan-1.3b"].layers, buckets[::2], MORE),
    ]
    if ranks > 1:  # sharded, all of it fits: before what stands for it
        cells += _shapes_of("wan-14b", MODELS["wan-14b"].layers, buckets, WHOLE if ranks == 2 else BUDGET)
    cells += [*_shapes_of("wan-14b", SHALLOW, buckets, BUDGET), *_full("wan-14b", DEEPER, buckets[::4], BUDGET)]
    return list(dict.fromkeys(cells))


def _shapes_of(model: str, layers: int, shapes: tuple[Shape, ...], budget: int) -> list[Cell]:
    """Micro-batches that fill the budget, single samples, and what lies between where that is much."""
    full = _full(model, layers, shapes, budget)
    middle = [(model, layers, s, round(b**0.5)) for *_, s, b in full if b >= 6]
    return [*full, *((model, layers, s, 1) for s in shapes), *middle]


def _full(model: str, layers: int, shapes: tuple[Shape, ...], budget: int) -> list[Cell]:
    return [(model, layers, s, max(1, budget // Tokenizer().tokens(s))) for s in shapes]


def _case_seconds(model: str, layers: int, batch: int, tokens: int) -> float:
    """Estimate on an H200: 4x forward FLOPs at 450 TFLOP/s, at least 9 ms a block; a warm-up, then up to 3 or 4 s."""
    once = max(4 * layers * float(MODELS[model].forward_flops(batch, tokens)) / 450e12, 9e-3 * layers)
    return 0.3 + once * (1 + min(3, math.ceil(4.0 / once)))


def _power(found: Fit) -> str:
    return f"{getattr(found.cost, 'p', float('nan')):.3g}"


def _draw_device(device: str, rows: pd.DataFrame) -> list[Figure]:
    from matplotlib.colors import LogNorm

    from repro.report import style

    shown = [(at, cells) for at in SHOWN if not (cells := _cells(rows, *at)).empty]
    if not shown:
        return []
    figure, axes = style.subplots(len(shown), 2, 2.3)
    filled = [cells["batch"] * cells["tokens"] for _, cells in shown]
    norm = LogNorm(min(n.min() for n in filled), max(n.max() for n in filled))
    for (left, right), ((model, layers), cells), n in zip(axes, shown, filled, strict=True):
        points = left.scatter(
            cells["tokens"], 1e3 * cells["forward_backward"] / n, c=n, norm=norm, cmap="viridis", s=20, zorder=2
        )
        found = fitted(rows, model, layers)
        if found is not None:
            full = cells.loc[cells.groupby("tokens")["batch"].idxmax()]
            line = 1e6 * found[0].cost.seconds(full["batch"], full["tokens"]) / (full["batch"] * full["tokens"])
            left.plot(full["tokens"], line, color=style.GREY, lw=1, label=f"fit, largest B: p = {_power(found[0])}")
            left.legend(loc="upper right")
        left.set(ylim=(0, 1.25 * left.get_ylim()[1]), title=f"{model}, {layers} layers", ylabel="us a token")
        right.plot(n / 1e3, cells["peak_memory"], "o", ms=4, color=style.color(ADALN))
        right.set(xlim=(0, 1.04 * n.max() / 1e3), ylim=(0, 1.04 * right.get_ylim()[1]), ylabel="peak memory, GB")
        last = left is axes[-1, 0]
        style.token_axis(left, cells["tokens"].to_numpy(), "tokens of one sample, S" if last else "")
        right.set_xlabel("thousand tokens, B S" if last else "")
    bar = figure.colorbar(points, ax=axes[:, 0], label="B S, tokens", pad=0.02, aspect=60)
    style.log_ticks(bar.ax.yaxis)
    style.legend(figure, ["measured"], axes=[])
    ranks = sorted({int(r) for r in rows["ranks"]})
    caption = (
        f"The trainer's forward and backward passes on {device} (ranks: {', '.join(map(str, ranks))}; full sharding, "
        "full checkpointing): time a token, with the fitted power law a + b B S^p at each length's largest batch, and "
        "peak memory."
    )
    return [Figure(f"shape_sweep-{device}", figure, caption, CLAIMS)]


def _draw_devices(rows: pd.DataFrame) -> list[Figure]:
    """Time a token at each length's largest batch, on all devices."""
    import pandas as pd

    from repro.report import devices

    panels = {}
    for model, layers in SHOWN:
        found = []
        for device, own in rows.groupby("device", sort=True):
            cells = _cells(own, model, layers)
            full = cells.loc[cells.groupby("tokens")["batch"].idxmax()] if len(cells) else cells
            found.append(full.assign(device=device))
        table = pd.concat(found, ignore_index=True)
        if devices.several(table):
            value = 1e3 * table["forward_backward"] / (table["batch"] * table["tokens"])
            panels[f"{model}, {layers} layers"] = table.assign(
                value=value, ci_low=value, ci_high=value, kind="measured"
            )
    if not panels:
        return []
    caption = "The trainer's forward and backward passes on each device, on the most ranks measured: largest batches."
    return [Figure("shape_sweep-devices", devices.lines(panels, "us a token"), caption, CLAIMS)]
