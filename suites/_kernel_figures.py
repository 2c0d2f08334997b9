"""Figures of kernel suites: speedup, share of the ceiling and time as called against the number of tokens.

One figure a device, metric and dtype, and one of all devices that have shapes in common.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.suite import Figure

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

PASSES = ("forward", "backward")
METRICS = {
    "speedup": "speedup over eager",
    "ceiling": "% of the large stream",
    "time_called": "us, called from Python",
}
"""Metrics that are drawn, and what their axes say."""
_STEMS = {"speedup": "kernel_speedup", "ceiling": "kernel_ceiling", "time_called": "kernel_called"}
_CAPTIONS = {
    "speedup": "Speedup over eager in the same dtype, device time with a cold cache, B=1; bars are 95% intervals.",
    "ceiling": "Bandwidth of necessary traffic, as % of the fastest large plain stream with the same mix of reads and "
    "writes (1:1 forward, 2:1 backward), B=1; bars are 95% intervals.",
    "time_called": "Time of a call from Python, launches included, B=1: what a user feels at small N, where the device "
    "waits for the host. Backwards go through autograd. Bars are 95% intervals.",
}
_GAPS = " A gap in a line is a cell that was skipped, or refused because it read far above the stream."
_FALLBACK = " Without a GPU the fused op is its composite fallback, and caches are not flushed."
_SAME = " Eager and Wan's formula are the same computation in fp32."

Paper = Mapping[str, tuple[str, float]]
"""pass -> (what the paper says, its speedup); the paper's figures are taken as bf16."""


def draw(rows: pd.DataFrame, paper: Paper, claims: Sequence[str], dtypes: Sequence[str]) -> list[Figure]:
    """Figures of a kernel suite's rows: those of each device, then those of all together."""
    rows = rows[(rows["batch"] == 1) & rows["metric"].isin(["time", *METRICS])]
    found = []
    for device, own in rows.groupby("device", sort=True):
        for metric, dtype in product(METRICS, dtypes):
            table = own[(own["metric"] == metric) & (own["dtype"] == dtype)]
            if table["tokens"].nunique() > 1:  # a single size is no line
                found.append(_draw_device(str(device), table, metric, dtype, paper, tuple(claims)))
    return [*found, *_draw_devices(rows[rows["dtype"] == dtypes[0]], paper, tuple(claims))]


def _draw_device(
    device: str, table: pd.DataFrame, metric: str, dtype: str, paper: Paper, claims: tuple[str, ...]
) -> Figure:
    from repro.report import style

    dims = sorted(table["dim"].unique(), reverse=True)
    figure, axes = style.subplots(len(dims), len(PASSES), sharex="col")
    for (i, dim), (j, direction) in product(enumerate(dims), enumerate(PASSES)):
        ax = axes[i, j]
        cell = table[(table["dim"] == dim) & (table["pass"] == direction)]
        tokens = sorted(cell["tokens"].unique())
        for impl in style.ordered(list(cell["impl"])):
            own = cell[cell["impl"] == impl].set_index("tokens").reindex(tokens).reset_index()  # a gap breaks the line
            style.series(ax, own["tokens"], own["value"], impl, low=own["ci_low"], high=own["ci_high"])
        style.token_axis(ax, tokens, "tokens N" if i == len(dims) - 1 else "")
        ax.set_title(f"{direction}, {dtype}, D={dim:,}")
        _heights(ax, cell, metric, paper[direction] if dtype == "bf16" else None)
        if j == 0:
            ax.set_ylabel(METRICS[metric])
    style.legend(figure, table["kind"])
    name = f"{_STEMS[metric]}{'' if dtype == 'bf16' else '_' + dtype}-{device}"
    same = (_SAME if dtype == "fp32" else "") + (_FALLBACK if device.startswith("cpu-") else "")
    smoke = " Smoke profile: small sizes, few samples." if (table["profile"] == "smoke").all() else ""
    runs = table["run_id"].nunique()
    told = "the newest of each: older ones may be of earlier kernels and of another machine"
    older = f" Cells are of {runs} runs, {told}." if runs > 1 else ""
    return Figure(name, figure, f"{device}, {dtype}. {_CAPTIONS[metric]}{_GAPS}{same}{smoke}{older}", claims)


def _draw_devices(rows: pd.DataFrame, paper: Paper, claims: tuple[str, ...]) -> list[Figure]:
    """The fused op on all devices, at the widest model that at least two of them measured."""
    from repro.report import style

    rows = rows[rows["impl"] == "fused"]
    on = rows.groupby("dim")["device"].nunique()
    if not (on > 1).any():
        return []
    dim = on.index[on > 1].max()
    rows = rows[rows["dim"] == dim]
    looks = style.device_looks(rows["device"])
    panels = ("speedup", "ceiling", "time")
    figure, axes = style.subplots(len(panels), len(PASSES), sharex="col")
    for (i, metric), (j, direction) in product(enumerate(panels), enumerate(PASSES)):
        ax = axes[i, j]
        cell = rows[(rows["metric"] == metric) & (rows["pass"] == direction)]
        for device, own in cell.groupby("device", sort=True):
            color, marker = looks[str(device)]
            look: Any = {"color": color, "marker": marker, "markerfacecolor": color, "label": str(device)}
            style.series(ax, own["tokens"], own["value"], "fused", low=own["ci_low"], high=own["ci_high"], **look)
        style.token_axis(ax, cell["tokens"].to_numpy(), "tokens N" if i == len(panels) - 1 else "")
        ax.set_title(f"{direction}, bf16, D={dim:,}")
        _heights(ax, cell, metric, paper[direction])
        if j == 0:
            ax.set_ylabel("device time, us" if metric == "time" else METRICS[metric])
    style.legend(figure, rows["kind"])
    caption = (
        f"The fused op on every device that was measured at D={dim:,}, bf16, B=1: speedup over eager, share of each "
        "device's own large stream, and device time. Without a GPU the op is its composite fallback. Bars are 95% "
        "intervals."
    )
    return [Figure("kernel_speed-devices", figure, caption, claims)]


def _heights(ax: Axes, cell: pd.DataFrame, metric: str, paper: tuple[str, float] | None) -> None:
    """From zero where that fits, with the paper's speedup or the ceiling marked."""
    from repro.report import style

    if metric.startswith("time"):
        ax.set_yscale("log")
        style.log_ticks(ax.yaxis)
        return
    top = float(np.nanmax([1.0, *cell["ci_high"]]))
    if metric == "ceiling":
        ax.axhline(100, color=style.BLACK, linewidth=0.8)
        top = max(top, 100.0)
    elif paper is not None:
        style.paper_value(ax, paper[1], paper[0])
        top = max(top, paper[1])
    ax.set_ylim(0, 1.08 * top)
