"""All claims at a glance: how much of the paper's effect was found, with its interval, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from repro.claims import BY_ID, AtLeast, Counts, Tolerance
from repro.report import style, tables
from repro.verdicts import headline

_START, _LIMIT = -0.25, 2.4
"""Ends of the scale in units of the paper's effect; what lies beyond is an arrow."""
_WIDTH, _LEFT, _PLOT = 11.0, 2.75, 4.3
"""Inches: the figure, the text left of the plot, the plot."""
_COLUMNS = {"id": -2.62 / _PLOT, "title": -2.25 / _PLOT, "paper": 1.02, "ours": 1.19, "verdict": 1.65}
"""Left edges of the columns of text in widths of the plot."""
_CHIPS = {
    "exceeded": style.GREEN,
    "reproduced": style.GREEN,
    "ambiguous": style.ORANGE,
    "partly": style.ORANGE,
    "not reproduced": style.RED,
    "not run": "#BBBBBB",
}


def draw(rows: Sequence[tables.Row]) -> Figure:
    """Rows of results/claims.csv as a dot plot on one scale: 0 is no effect, 1 the paper's value."""
    height = 0.3 * len(rows) + 1.5
    figure = Figure(figsize=(_WIDTH, height))
    axes: Axes = figure.add_axes((_LEFT / _WIDTH, 0.85 / height, _PLOT / _WIDTH, 1 - 1.5 / height))
    axes.set(xlim=(_START, _LIMIT), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xlabel(
        "effect found / the paper's effect   (0: no effect; shaded: the paper's value within its tolerance)"
    )
    axes.xaxis.set_ticks([0, 0.5, 1, 1.5, 2])
    axes.xaxis.label.set_fontsize(8)
    axes.yaxis.set_ticks([])
    axes.spines["left"].set_visible(False)
    axes.axvline(0, color=style.GREY, linewidth=0.8, zorder=0.5)
    axes.axvline(1, color=style.GREY, linewidth=1.1, linestyle=(0, (5, 3)), zorder=0.5)
    for y, row in enumerate(rows):
        _marks(axes, y, row)
        _words(axes, y, row)
    for column, text in (
        ("title", "claim"),
        ("paper", "paper"),
        ("ours", "ours [95% interval]"),
        ("verdict", "verdict"),
    ):
        axes.text(_COLUMNS[column], -0.9, text, transform=axes.get_yaxis_transform(), weight="bold", fontsize=8.5)
    handles = style.kind_handles(["measured", "simulated"])
    figure.legend(handles=handles, ncols=2, loc="lower left", bbox_to_anchor=(0.005, 0.01))
    figure.text(0.012, 1 - 0.3 / height, headline(rows), fontsize=9.5)
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


def _marks(axes: Axes, y: int, row: tables.Row) -> None:
    found = scale(row)
    axes.axhline(y + 0.5, xmin=_COLUMNS["id"], xmax=1.93, color="#E8E8E8", linewidth=0.7, clip_on=False, zorder=0.4)
    if found is None:
        axes.text(1.04, y, "judged by a threshold", va="center", fontsize=7, color=style.GREY)
        return
    none, paper = found

    def position(value: float) -> float:
        return (value - none) / (paper - none)

    rule = BY_ID[row["id"]].rule
    if isinstance(rule, Tolerance):
        low, high = (max(position(paper + s * rule.tolerance * abs(paper)), _START) for s in (-1, 1))
        axes.fill_betweenx([y - 0.36, y + 0.36], low, high, color="#EFEFEF", linewidth=0)
    if not row["value"]:
        return
    x = position(float(row["value"]))
    ends = [position(float(row[c])) if row[c] else math.nan for c in ("ci_low", "ci_high")]
    colour = _CHIPS[row["verdict"]]
    if not _START < x < _LIMIT:
        end, arrow = (_LIMIT - 0.04, ">") if x >= _LIMIT else (_START + 0.04, "<")
        axes.plot(end, y, marker=arrow, color=colour, markerfacecolor=_face(row, colour))
        return
    axes.plot([max(ends[0], _START), min(ends[1], _LIMIT)], [y, y], color=colour, linewidth=2, solid_capstyle="butt")
    axes.plot(x, y, marker="o", markersize=6.5, color=colour, markerfacecolor=_face(row, colour))


def _words(axes: Axes, y: int, row: tables.Row) -> None:
    place = axes.get_yaxis_transform()
    dull = style.GREY if row["verdict"] == "not run" else "black"
    words = {"title": BY_ID[row["id"]].title, "paper": tables.paper(row), "ours": tables.ours(row)}
    axes.text(_COLUMNS["id"], y, row["id"], transform=place, va="center", weight="bold", fontsize=8, color=dull)
    for column, text in words.items():
        axes.text(_COLUMNS[column], y, text, transform=place, va="center", fontsize=8, color=dull)
    axes.text(
        _COLUMNS["verdict"],
        y,
        row["verdict"],
        transform=place,
        va="center",
        fontsize=7.5,
        color="white",
        weight="bold",
        bbox={"boxstyle": "round,pad=0.25", "facecolor": _CHIPS[row["verdict"]], "linewidth": 0},
    )


def _face(row: tables.Row, colour: str) -> str:
    return colour if row["kind"] == "measured" else "white"
