"""All claims at a glance: how much of the paper's effect was found, with its interval, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repro.claims import BY_ID, AtLeast, Counts, Tolerance
from repro.report import style, tables
from repro.verdicts import headline

_START, _LIMIT = -0.25, 2.4
"""Ends of the scale in units of the paper's effect; what lies beyond is an arrow."""
_LEFT, _PLOT = 1.75, 1.6
"""Inches: the text left of the plot, the plot."""
_COLUMNS = {"id": -1.68 / _PLOT, "title": -1.38 / _PLOT, "ours": 1.05, "verdict": 1.05 + 0.82 / _PLOT}
"""Left edges of the columns of text in widths of the plot."""
_ROW, _TOP, _BOTTOM = 0.29, 0.72, 0.72
"""Inches: a claim, what stands above all of them, and below."""
_CHIPS = {
    "exceeded": (style.GREEN, "white"),
    "reproduced": (style.GREEN, "white"),
    "ambiguous": (style.ORANGE, "black"),
    "partly": (style.ORANGE, "black"),
    "not reproduced": (style.RED, "white"),
    "not run": ("#D0D0D0", "black"),
}
"""Colours of a verdict and of its name."""
_SCALE = "effect found / the paper's effect"


def draw(rows: Sequence[tables.Row]) -> Figure:
    """Rows of results/claims.csv as a dot plot on one scale: 0 is no effect, 1 the paper's value."""
    figure, axes = _canvas(len(rows))
    for y, row in enumerate(rows):
        color = _CHIPS[row["verdict"]][0]
        found = scale(row)
        axes.axhline(y + 0.5, xmin=_COLUMNS["id"], xmax=2.13, color="#E6E6E6", linewidth=0.7, clip_on=False, zorder=0.4)
        if found is None:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
            look: Any = {"fontsize": style.SMALLEST, "color": style.NOTE, "bbox": box}
            interval = ", ".join(tables.number(row[end]) for end in ("ci_low", "ci_high"))
            told = f"[{interval}]\njudged by a threshold" if row["value"] else "judged by a threshold"
            axes.text(0.04, y, told, va="center", **look)
        else:
            _tolerance(axes, y, row, found)
            _mark(axes, y, row, found, color, "o")
        _words(axes, y, row)
    place = axes.get_yaxis_transform()
    for column, text in (("title", "claim"), ("ours", "ours"), ("verdict", "verdict")):
        axes.text(_COLUMNS[column], -1.05, text, transform=place, weight="bold", fontsize=8)
    axes.text(_COLUMNS["ours"], -0.68, "paper", transform=place, color=style.NOTE, fontsize=style.SMALLEST)
    figure.legend(handles=style.kind_handles(["measured", "simulated"]), loc="lower right")
    measured, simulated, rest = headline(rows).split("; ")
    told = f"{measured}\n{simulated}; {rest}"
    figure.text(0.07 / style.WIDTH, 1 - 0.05 / figure.get_figheight(), told, fontsize=8, va="top")
    return figure


def draw_devices(rows: Sequence[tables.Row]) -> Figure | None:
    """Claims that were judged on several devices, a mark a device, on the same scale; None where there are none.

    rows: of results/claims.csv and claims_by_device.csv.
    """
    judged = [r for r in rows if r["device"] and scale(r) is not None]
    of_claim = {c: [r for r in judged if r["id"] == c] for c in dict.fromkeys(r["id"] for r in judged)}
    shown = {c: own for c, own in of_claim.items() if len({r["device"] for r in own}) > 1}
    if not shown:
        return None
    looks = style.device_looks(r["device"] for own in shown.values() for r in own)
    step = 0.12 + 0.1 * len(looks)
    figure, grid = style.subplots(1, 1, step * len(shown) + 1.0)
    axes: Axes = grid[0, 0]
    axes.set(xlim=(_START, _LIMIT), ylim=(len(shown) - 0.5, -0.5), xlabel=_SCALE)
    axes.grid(axis="y", visible=False)
    for y, own in enumerate(shown.values()):
        for row in sorted(own, key=lambda r: r["device"]):
            i = list(looks).index(row["device"])
            found = scale(row)
            assert found is not None
            color, marker = looks[row["device"]]
            _mark(axes, y + 0.7 * ((i + 0.5) / len(looks) - 0.5), row, found, color, marker)
    for device, (color, marker) in looks.items():
        axes.plot([], [], marker, color=color, label=device)
    axes.set_yticks(range(len(shown)), [f"{c}  {BY_ID[c].title}" for c in shown])
    style.paper_value(axes, 1, "the paper's value", along="y")
    style.legend(figure, {r["kind"] for own in shown.values() for r in own})
    return figure


def scale(row: tables.Row) -> tuple[float, float] | None:
    """(no effect, the paper's value) where the effect has a natural zero; thresholds and equivalences have none."""
    rule = BY_ID[row["id"]].rule
    if not row["paper"] or float(row["paper"]) == 0:
        return None
    if isinstance(rule, Tolerance):
        return rule.no_effect, float(row["paper"])
    if isinstance(rule, Counts):
        return 1.0, float(row["paper"])
    return (0.0, float(row["paper"])) if isinstance(rule, AtLeast) else None


def _canvas(rows: int) -> tuple[Figure, Axes]:
    height = _ROW * rows + _TOP + _BOTTOM
    figure = Figure(figsize=(style.WIDTH, height))
    place = (_LEFT / style.WIDTH, _BOTTOM / height, _PLOT / style.WIDTH, 1 - (_TOP + _BOTTOM) / height)
    axes: Axes = figure.add_axes(place)
    axes.set(xlim=(_START, _LIMIT), ylim=(rows - 0.5, -0.5))
    axes.set_xlabel(f"{_SCALE}\n0: none; shaded: within the tolerance")
    axes.xaxis.set_ticks([0, 0.5, 1, 1.5, 2])
    axes.yaxis.set_ticks([])
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=style.GREY, linewidth=0.8, zorder=0.5)
    axes.axvline(1, color=style.GREY, linewidth=1.1, linestyle=(0, (5, 3)), zorder=0.5)
    return figure, axes


def _position(value: float, ends: tuple[float, float]) -> float:
    none, paper = ends
    return (value - none) / (paper - none)


def _tolerance(axes: Axes, y: float, row: tables.Row, ends: tuple[float, float]) -> None:
    rule = BY_ID[row["id"]].rule
    if isinstance(rule, Tolerance):
        margin = rule.tolerance * ends[1]
        low, high = np.clip([_position(ends[1] + s * margin, ends) for s in (-1, 1)], _START, _LIMIT)
        axes.fill_betweenx([y - 0.36, y + 0.36], low, high, color="#E9E9E9", linewidth=0)


def _mark(axes: Axes, y: float, row: tables.Row, ends: tuple[float, float], color: str, marker: str) -> None:
    """Value and interval, an arrow at the end of the scale where the value lies beyond."""
    if not row["value"]:
        return
    x = _position(float(row["value"]), ends)
    face = color if row["kind"] == "measured" else "white"
    if not _START < x < _LIMIT:
        end, arrow = (_LIMIT - 0.06, ">") if x >= _LIMIT else (_START + 0.06, "<")
        axes.plot(end, y, marker=arrow, color=color, markerfacecolor=face)
        return
    low, high = (_position(float(row[c]), ends) if row[c] else math.nan for c in ("ci_low", "ci_high"))
    line = [max(low, _START), min(high, _LIMIT)]
    axes.plot(line, [y, y], color=color, linewidth=2, solid_capstyle="butt")
    axes.plot(x, y, marker=marker, markersize=5.5, color=color, markerfacecolor=face, clip_on=False)


def _words(axes: Axes, y: int, row: tables.Row) -> None:
    """Title over what is counted, our value over the paper's, and the verdict."""
    place = axes.get_yaxis_transform()
    look: Any = {"transform": place, "fontsize": style.SMALLEST}
    title, _, counted = BY_ID[row["id"]].title.partition(": ")
    axes.text(_COLUMNS["id"], y, row["id"], va="center", weight="bold", **look)
    axes.text(_COLUMNS["title"], y - 0.02, title, va="bottom", **look)
    axes.text(_COLUMNS["title"], y + 0.02, counted, va="top", color=style.NOTE, **look)
    axes.text(_COLUMNS["ours"], y - 0.02, tables.number(row["value"], row["unit"]), va="bottom", **look)
    axes.text(_COLUMNS["ours"], y + 0.02, tables.paper(row), va="top", color=style.NOTE, **look)
    back, front = _CHIPS[row["verdict"]]
    box = {"boxstyle": "round,pad=0.25", "facecolor": back, "linewidth": 0}
    axes.text(_COLUMNS["verdict"], y, row["verdict"], va="center", color=front, weight="bold", bbox=box, **look)
