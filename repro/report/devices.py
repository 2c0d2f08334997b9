"""Several devices in one picture: a row a quantity, a mark a device, with what the paper says where it says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.figure
import numpy as np
import pandas as pd

from repro.report import style

Paper = tuple[str, float]
"""What the paper says of a panel's quantity, and where on its axis that is."""


def several(rows: pd.DataFrame) -> bool:
    """Whether rows are of more than one device."""
    return bool(rows["device"].nunique() > 1)


def lines(
    panels: Mapping[str, pd.DataFrame], quantity: str, log: bool = False, x: str = "tokens of one sample, S"
) -> matplotlib.figure.Figure:
    """Panels beside each other, a line a device against a number of tokens.

    panels: title -> a table with columns device, tokens, value, ci_low, ci_high and kind. quantity: what y says.
    """
    looks = style.device_looks(d for table in panels.values() for d in table["device"])
    figure, axes = style.subplots(1, len(panels), 2.5, sharey=not log)
    for ax, (title, table) in zip(axes[0], panels.items(), strict=True):
        for (device, kind), own in table.groupby(["device", "kind"], sort=True):
            color, marker = looks[str(device)]
            face = color if kind == "measured" else "white"
            look: Any = {"color": color, "marker": marker, "markerfacecolor": face, "label": str(device)}
            style.series(ax, own["tokens"], own["value"], "", low=own["ci_low"], high=own["ci_high"], **look)
        if log:
            ax.set_yscale("log")
            style.log_ticks(ax.yaxis)
        style.token_axis(ax, table["tokens"].to_numpy(), x)
        ax.set_title(title)
    axes[0, 0].set_ylabel(quantity)
    if not log:
        axes[0, 0].set_ylim(0, None)
    style.legend(figure, {k for table in panels.values() for k in table["kind"]})
    return figure


def dots(panels: Mapping[str, pd.DataFrame], paper: Mapping[str, Paper] | None = None) -> matplotlib.figure.Figure:
    """One panel below the other, the devices' values of each row side by side.

    panels: what the axis says (quantity and unit) -> a table with columns row (its label), device, value, ci_low,
    ci_high and kind; rows stay in the order in which they first appear. paper: by panel.
    """
    looks = style.device_looks(d for table in panels.values() for d in table["device"])
    counts = [table["row"].nunique() for table in panels.values()]
    lines = max(str(row).count("\n") + 1 for table in panels.values() for row in table["row"])
    step = max(0.09 + 0.09 * len(looks), 0.13 * lines + 0.04)
    figure = matplotlib.figure.Figure(
        figsize=(style.WIDTH, sum(step * n + 0.62 for n in counts) + 0.3), layout="constrained"
    )
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[step * n + 0.1 for n in counts])
    for ax, (quantity, table) in zip(grid[:, 0], panels.items(), strict=True):
        names = list(dict.fromkeys(table["row"]))
        for i, (device, (color, marker)) in enumerate(looks.items()):
            for kind, own in table[table["device"] == device].groupby("kind", sort=True):
                place = np.array([names.index(n) for n in own["row"]]) + 0.7 * ((i + 0.5) / len(looks) - 0.5)
                value = own["value"].to_numpy(float)
                ends = np.stack([value - own["ci_low"].to_numpy(float), own["ci_high"].to_numpy(float) - value])
                face = color if kind == "measured" else "white"
                ax.errorbar(
                    value, place, xerr=ends.clip(0), fmt=marker, color=color, mfc=face, elinewidth=1.2, label=device
                )
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        ax.set_xlabel(quantity)
        ax.grid(axis="y", visible=False)
        for line in range(1, len(names)):
            ax.axhline(line - 0.5, color="#E6E6E6", linewidth=0.7, zorder=0.5)
        if paper and quantity in paper:
            text, at = paper[quantity]
            style.paper_value(ax, at, text, along="y")
        low, high = ax.get_xlim()
        low, high = min(low, 0), max(high, 0)
        ax.set_xlim(low - 0.03 * (high - low) * (low < 0), high + 0.03 * (high - low) * (high > 0))  # whole marks
    style.legend(figure, {k for table in panels.values() for k in table["kind"]})
    return figure
