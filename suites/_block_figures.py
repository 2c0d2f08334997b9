"""Figures of `block_time`: time per token over shapes, AdaLN against eager, and with what equal-token steps go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import LogNorm

from repro.suite import Figure
from suites import block_time

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

    from repro.measure.stats import Interval

PAPER_R = {"total tokens, B S": 0.35, "length squared, S²": 0.92}
"""Correlations with step time, "about" (AdaptiveLoad, arXiv 2605.17923)."""


def draw(rows: pd.DataFrame) -> list[Figure]:
    """Of every device with rows of a real model: shapes, and the correlation; of several devices, time by length."""
    table = block_time.times(rows)
    table = table[table["model"].isin(block_time.SHOWN)]
    figures = []
    correlations = {}
    for device, own in table.groupby("device", sort=True):
        figures.append(_draw_shapes(str(device), own))
        found = {model: block_time.replay(own.assign(suite=block_time.NAME), model) for model in block_time.SHOWN}
        known = {model: r for model, r in found.items() if r is not None}
        if known:
            correlations[str(device)] = known
            figures.append(_draw_replay(str(device), own.assign(suite=block_time.NAME), known))
    return figures + _draw_correlations(correlations) + _draw_devices(table)


def _draw_shapes(device: str, table: pd.DataFrame) -> Figure:
    from repro.report import style

    table = table[table["layers"] == table["model"].map(block_time.LAYERS)].copy()
    table["n"] = table["batch"] * table["tokens"]
    shape = ["model", "batch", "tokens"]
    columns = ["value", "ci_low", "ci_high"]
    eager = table[table["adaln"] == "eager"].set_index(shape)[columns].add_prefix("eager_")
    table = table.join(eager, on=shape)
    models = [m for m in block_time.SHOWN if (table["model"] == m).any()]
    figure, axes = style.subplots(2, len(models), 2.3)
    colors = LogNorm(table["n"].min(), table["n"].max())
    for column, model in enumerate(models):
        top, bottom = axes[:, column]
        of_model = table[table["model"] == model]
        cells = of_model[of_model["adaln"] == "eager"]
        scale = 1e3 / block_time.LAYERS[model] / cells["n"]
        ends = np.stack([cells["value"] - cells["ci_low"], cells["ci_high"] - cells["value"]]) * scale.to_numpy()
        top.errorbar(
            cells["tokens"], cells["value"] * scale, ends, fmt="none", ecolor=style.GREY, elinewidth=1.2, zorder=1.9
        )
        points = top.scatter(
            cells["tokens"], cells["value"] * scale, c=cells["n"], norm=colors, cmap="viridis", s=20, zorder=2
        )
        top.set(yscale="log", title=f"{model}, eager AdaLN")
        for adaln in style.ordered([a for a in of_model["adaln"].unique() if a != "eager"]):
            own = of_model[of_model["adaln"] == adaln]
            # the widest that the two intervals allow
            low, high = own["ci_low"] / own["eager_ci_high"], own["ci_high"] / own["eager_ci_low"]
            style.series(
                bottom, own["n"], own["value"] / own["eager_value"], adaln, low=low, high=high, line=False, alpha=0.8
            )
        bottom.axhline(1, color=style.BLACK, linewidth=0.8)
        style.token_axis(top, cells["tokens"].to_numpy(), "tokens of one sample, S")
        style.token_axis(
            bottom, of_model[of_model["adaln"] != "eager"]["n"].to_numpy(), "tokens in the micro-batch, B S"
        )
        style.log_ticks(top.yaxis)
    axes[0, 0].set_ylabel("us a token and block")
    axes[1, 0].set_ylabel("step time / eager's")
    bar = figure.colorbar(points, ax=axes[0], label="B S, tokens", pad=0.02)
    style.log_ticks(bar.ax.yaxis)
    style.legend(figure, ["measured"])
    caption = (
        f"Forward and backward of plain Wan blocks on {device}, full checkpointing, no communication. Above: time per "
        "token is flat where the linears rule and rises where attention does; small micro-batches pay for launches. "
        "Below: the same blocks with another AdaLN, over eager's time for the same shape (the line at 1). Bars are 95% "
        "intervals, of a ratio the widest that the intervals of both times allow."
    )
    return Figure(f"block_time-{device}", figure, caption)


def _draw_replay(device: str, rows: pd.DataFrame, found: dict[str, tuple[Interval, Interval]]) -> Figure:
    from repro.report import style

    model = next(iter(found))
    steps = block_time.equal_token_times(rows, model)
    assert steps is not None
    figure, axes = style.subplots(2, 2, 1.9, height_ratios=[2.2, 1])
    seconds = steps["value"] / 1e3
    panels = (
        (axes[0, 0], steps["batch"] * steps["tokens"] / 1e3, "total tokens B S, thousands"),
        (axes[0, 1], steps["tokens"] ** 2 / 1e6, "length squared S², millions"),
    )
    for ax, x, label in panels:
        points = ax.scatter(x, seconds, c=steps["tokens"], norm=LogNorm(), cmap="viridis", s=24, zorder=2)
        ax.set(xlabel=label, ylim=(0, None), title=f"{model} width")
        ax.margins(x=0.1)
    axes[0, 0].set_ylabel(f"measured s, {block_time.LAYERS[model]} blocks")
    bar = figure.colorbar(points, ax=axes[0], label="S, tokens of one sample", pad=0.02)
    style.log_ticks(bar.ax.yaxis)
    grid = axes[1, 0].get_gridspec()
    for ax in axes[1]:
        ax.remove()
    _correlations(figure.add_subplot(grid[1, :]), found)
    style.legend(figure, ["measured", "simulated"])
    caption = (
        f"Equal-token micro-batches of wan-uniform on {device}: about the same tokens, yet step time follows the "
        "square of the sequence length. Below: correlation over steps drawn evenly from them, simulated, with the "
        f"range of 95% of logs of {block_time.STEPS:,} steps, and the paper's (dashed)."
    )
    return Figure(f"equal_token_correlation-{device}", figure, caption, block_time.CLAIMS)


def _correlations(ax: Axes, found: dict[str, tuple[Interval, Interval]]) -> None:
    """R of each model with each quantity, and what the paper says."""
    from repro.report import style

    looks = dict(zip(block_time.SHOWN, ((style.BLUE, "o"), (style.ORANGE, "s")), strict=True))
    for i, paper in enumerate(PAPER_R.values()):
        for k, (model, intervals) in enumerate(found.items()):
            r, (color, marker) = intervals[i], looks[model]
            place = i + 0.32 * (k - (len(found) - 1) / 2)
            label = f"{model} width" if i == 0 else "_"
            ends = [[r.value - r.low], [r.high - r.value]]
            look: Any = {"fmt": marker, "color": color, "markerfacecolor": "white", "elinewidth": 1.2}
            ax.errorbar(r.value, place, xerr=ends, label=label, **look)
        ax.plot([paper, paper], [i - 0.42, i + 0.42], color=style.GREY, linestyle=(0, (5, 3)), linewidth=1.1)
    ax.set_yticks(range(len(PAPER_R)), [f"{quantity}\npaper: about {r}" for quantity, r in PAPER_R.items()])
    ax.set(xlim=(0, 1.02), ylim=(len(PAPER_R) - 0.45, -0.55), xlabel="correlation with step time, R; simulated steps")
    ax.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.grid(axis="y", visible=False)


def _draw_correlations(found: dict[str, dict[str, tuple[Interval, Interval]]]) -> list[Figure]:
    """R of every model on all devices."""
    import pandas as pd

    from repro.report import devices

    if len(found) < 2:
        return []
    panels = {}
    for i, quantity in enumerate(PAPER_R):
        rows = [
            {"row": f"{model} width", "device": device, "kind": "simulated",
             "value": r[i].value, "ci_low": r[i].low, "ci_high": r[i].high}
            for device, of_model in found.items() for model, r in of_model.items()
        ]  # fmt: skip
        panels[f"R of step time and {quantity}"] = pd.DataFrame(rows)
    paper = {name: (f"paper: about {r}", r) for name, r in zip(panels, PAPER_R.values(), strict=True)}
    caption = (
        "Correlation over equal-token steps drawn evenly from wan-uniform, from each device's times, with the range of "
        f"95% of logs of {block_time.STEPS:,} steps."
    )
    return [Figure("equal_token_correlation-devices", devices.dots(panels, paper), caption, block_time.CLAIMS)]


def _draw_devices(table: pd.DataFrame) -> list[Figure]:
    """Time of the blocks on all devices, in the shapes of equal-token steps."""
    from repro.report import devices

    table = table[(table["adaln"] == "eager") & (table["layers"] == table["model"].map(block_time.LAYERS))]
    table = table[table["batch"] == np.maximum(1, block_time.BUDGETS[0] // table["tokens"])]
    if not devices.several(table):
        return []
    scale = 1e3 / table["model"].map(block_time.LAYERS) / (table["batch"] * table["tokens"])
    table = table.assign(**{c: table[c] * scale for c in ("value", "ci_low", "ci_high")})
    panels = {f"{m} width": table[table["model"] == m] for m in block_time.SHOWN if (table["model"] == m).any()}
    figure = devices.lines(panels, "us a token and block", log=True)
    caption = (
        "Forward and backward of a Wan block on each device: equal-token micro-batches (48,000 tokens, at least one "
        "sample), eager AdaLN, full checkpointing. Bars are 95% intervals."
    )
    return [Figure("block_time-devices", figure, caption)]
