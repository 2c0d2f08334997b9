"""What `repro.adaln.accelerate` does to a training step of a Diffusers Wan model: time and memory, before and after.

Columns: model, layers (blocks measured, fewer than the model has), adaln (wan: Diffusers as it comes; fused: the same
model accelerated), checkpointing (none, full), batch, tokens (of one sample: Wan's 81 frames, at 480x832 and at a
quarter of that). Weights and activations are bf16 on a GPU.

Metrics: forward_backward (ms), speedup (of fused: wan's time over fused's, both of the same process), and on a GPU
static_memory, held_memory, peak_memory (GB of 10^9 bytes; see `repro.measure.diffusers_step.StepSample`).
"""

from __future__ import annotations

import functools
from itertools import product
from typing import TYPE_CHECKING

from repro.balance.models import MODELS
from repro.measure.stats import exact, measured, median_interval, ratio_interval, seed_text
from repro.suite import Case, CaseSkipped, Evidence, Figure, Measurement, Profile

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.diffusers_step import StepSample
    from repro.measure.machine import Machine

NAME = "accelerate"
CLAIMS: tuple[str, ...] = ()
NEEDS: tuple[str, ...] = ()
PARAMETERS = ("model", "layers", "adaln", "checkpointing", "batch", "tokens")

LAYERS = {"wan-14b": 2, "wan-1.3b": 4, "tiny": 2}
LATENTS = {32_760: (21, 60, 104), 8_190: (21, 30, 52), 32: (2, 8, 8)}
"""Frames, height and width of the latents by tokens: patches are 1 x 2 x 2."""
ADALN = ("wan", "fused")
CHECKPOINTING = ("none", "full")


def cases(profile: Profile, machine: Machine) -> list[Case]:
    """Before and after of a shape follow each other, so that slow drifts of the clocks cancel in their ratio."""
    if profile == "smoke":
        grid = [("tiny", 32, "none")]
    elif machine.has_gpu:
        grid = list(product(("wan-14b", "wan-1.3b"), (32_760, 8_190), CHECKPOINTING))
    else:
        grid = []  # wide blocks on a CPU say nothing about training
    return [_case(model, adaln, c, tokens) for (model, tokens, c), adaln in product(grid, ADALN)]


def measure(case: Case, machine: Machine, inputs: pd.DataFrame) -> list[Measurement]:
    """Train for some steps. Raises CaseSkipped without Diffusers, without kernels, or where memory runs out;
    `repro.measure.verify.WrongResultError` where accelerating changes results by more than rounding.
    """
    import torch

    from repro.measure import diffusers_step, kernel_rows

    try:
        import diffusers  # noqa: F401
    except ImportError as e:
        raise CaseSkipped(f"Diffusers is missing: pip install diffusers ({e})") from e
    key = case.key
    if machine.has_gpu:
        kernel_rows.require_kernels(str(key["adaln"]))
    cell = (str(key["model"]), int(key["layers"]), str(key["checkpointing"]), int(key["tokens"]))
    try:
        sample = _sample(*cell, str(key["adaln"]), machine.has_gpu)
        seed = seed_text(NAME, key)
        interval = median_interval(sample.milliseconds, seed)
        rows = [measured("forward_backward", "ms", interval, sample.milliseconds), *_memory(sample)]
        if key["adaln"] == "fused":
            before = _sample(*cell, "wan", machine.has_gpu).milliseconds
            rows.append(measured("speedup", "x", ratio_interval(before, sample.milliseconds, seed)))
        return rows
    except torch.OutOfMemoryError as e:
        reason = f"{dict(key)} does not fit into memory: {str(e).splitlines()[0]}"
    # Outside the handler: the exception's traceback holds the tensors that are to be freed.
    diffusers_step.free()
    raise CaseSkipped(reason)


def forget(case: Case, machine: Machine) -> None:
    """Drop all times of this process."""
    _sample.cache_clear()


def evidence(rows: pd.DataFrame) -> list[Evidence]:
    """No claim of the paper is about Diffusers; T6 is answered by the trainer's own model."""
    return []


def tell(rows: pd.DataFrame) -> dict[str, str]:
    """Section `accelerate`: step time and peak memory before and after, on every GPU."""
    from repro.report.documents import NOTHING, by_adaln, table

    cells = []
    by_cell = rows.groupby(["device", "model", "layers", "checkpointing", "tokens"], sort=False) if len(rows) else ()
    for place, at in by_cell:
        device, model, layers, checkpointing, tokens = map(str, place)
        of = by_adaln(at)
        if ("speedup", "fused") not in of or ("peak_memory", "wan") not in of:
            continue
        step, peak = (
            f"{of[metric, 'wan'].value:{form}} to {of[metric, 'fused'].value:{form}}"
            for metric, form in (("forward_backward", ".1f"), ("peak_memory", ".2f"))
        )
        ratio = of["speedup", "fused"]
        told = f"{ratio.value:.3f}x [{ratio.low:.3f}, {ratio.high:.3f}]"
        width = f"{_width(model)}, {layers} blocks"
        cells.append([device, width, f"{int(tokens):,}", checkpointing, step, told, peak])
    head = ["device", "width", "tokens", "checkpointing", "forward and backward, ms", "speedup", "peak memory, GB"]
    return {"accelerate": table(head, cells) if cells else NOTHING}


def draw(rows: pd.DataFrame) -> list[Figure]:
    """For each device: step time and peak memory before and after."""
    rows = rows[(rows["suite"] == NAME) & rows["metric"].isin(["forward_backward", "peak_memory"])]
    rows = rows[rows["model"] != "tiny"]  # a smoke test's times would say nothing
    return [*(_draw(str(device), own) for device, own in rows.groupby("device", sort=True)), *_draw_devices(rows)]


@functools.lru_cache(maxsize=4)
def _sample(model: str, layers: int, checkpointing: str, tokens: int, adaln: str, gpu: bool) -> StepSample:
    import torch

    from repro.measure import diffusers_step

    return diffusers_step.measure_step(
        MODELS[model],
        layers,
        LATENTS[tokens],
        fused=adaln == "fused",
        checkpointing=checkpointing == "full",
        device=torch.device("cuda" if gpu else "cpu"),
        seconds=3.0 if gpu else 0.0,
        repeats=(10, 30) if model != "tiny" else (5, 5),
    )


def _memory(sample: StepSample) -> list[Measurement]:
    sizes = {"static": sample.static_bytes, "held": sample.held_bytes, "peak": sample.peak_bytes}
    return [exact(f"{name}_memory", "GB", size / 1e9) for name, size in sizes.items() if size is not None]


def _case(model: str, adaln: str, checkpointing: str, tokens: int) -> Case:
    values = (model, LAYERS[model], adaln, checkpointing, 1, tokens)
    # 3 or, with checkpointing, 4 times the forward's FLOPs at 500 TFLOP/s, 10 to 30 steps in 3 s, and three more.
    flops = (3 + (checkpointing == "full")) * LAYERS[model] * float(MODELS[model].forward_flops(1, tokens))
    step = flops / 500e12
    seconds = 0.3 if model == "tiny" else 1.0 + step * (4 + min(max(3 / step, 10), 30))
    return Case(dict(zip(PARAMETERS, values, strict=True)), seconds)


def _draw(device: str, rows: pd.DataFrame) -> Figure:
    from repro.report import style

    cells = rows[["model", "tokens", "checkpointing"]].drop_duplicates()
    cells = cells.sort_values(["model", "tokens", "checkpointing"], ascending=[True, False, False])
    names = [
        f"{_width(str(model))}, S={int(str(tokens)):,}{', checkpointed' if c == 'full' else ''}"
        for model, tokens, c in cells.itertuples(index=False)
    ]
    figure, axes = style.subplots(2, 1, height=0.6 + 0.3 * len(cells))
    panels = (
        ("forward_backward", "ms, forward and backward of the blocks measured"),
        ("peak_memory", "peak memory, GB"),
    )
    for ax, (metric, label) in zip(axes[:, 0], panels, strict=True):
        _draw_bars(ax, rows[rows["metric"] == metric], cells)
        ax.set_yticks(range(len(cells)), names)
        ax.invert_yaxis()
        ax.set_xlabel(label)
    style.legend(figure, rows["kind"], bars=True)
    depths = ", ".join(f"{_width(str(model))} {own['layers'].iloc[0]}" for model, own in rows.groupby("model"))
    caption = (
        f"{device}: forward and backward of a Diffusers WanTransformer3DModel, bf16, one sample, as it comes (Wan's "
        f"fp32 formula) and accelerated. Blocks: {depths}. Bars end at medians, lines are 95% intervals."
    )
    return Figure(f"accelerate-{device}", figure, caption)


def _draw_devices(rows: pd.DataFrame) -> list[Figure]:
    """Step time and memory with the fused op on all devices."""
    from repro.report import devices

    if not devices.several(rows):
        return []
    cells = rows[rows["adaln"] == "fused"].sort_values(["model", "tokens"])
    tokens = cells["tokens"].map(lambda n: f"{int(n):,}")
    cells = cells.assign(row=cells["model"] + ", S=" + tokens + ", " + cells["checkpointing"])
    panels = {"ms a training step": "forward_backward", "peak memory, GB": "peak_memory"}
    shown = {name: cells[cells["metric"] == metric] for name, metric in panels.items()}
    figure = devices.dots({name: own for name, own in shown.items() if len(own)})
    caption = "A Diffusers WanTransformer3DModel, accelerated, on each device. Bars are 95% intervals."
    return [Figure("accelerate-devices", figure, caption)]


def _width(model: str) -> str:
    return model.removeprefix("wan-").upper()


def _draw_bars(ax: Axes, table: pd.DataFrame, cells: pd.DataFrame) -> None:
    from repro.report import style

    keys = ["model", "tokens", "checkpointing"]
    for offset, adaln in ((-0.2, "wan"), (0.2, "fused")):
        own = cells.merge(table[table["adaln"] == adaln], on=keys, how="left")
        values = own["value"].to_numpy(float)
        ends = [values - own["ci_low"].to_numpy(float), own["ci_high"].to_numpy(float) - values]
        places, text = [i + offset for i in range(len(own))], style.label(adaln)
        bars = ax.barh(places, values, 0.38, xerr=ends, color=style.color(adaln), label=text)
        style.bar_values(ax, bars, "%.3g")
    ax.margins(x=0.12)
