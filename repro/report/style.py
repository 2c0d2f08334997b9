"""The look that all figures share, and the few marks that must mean the same everywhere.

    colour            who: one per implementation or policy (Okabe and Ito's colour-blind safe set)
    filled marker     measured            hollow marker   simulated
    dashed grey line  what the paper says

A suite's `draw` is called inside `context()`; it makes its figure with `subplots` and returns it, unsaved. No pyplot:
figures are objects without global state, so that a redraw of the same rows gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PINK, BLACK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#000000", "#7F7F7F"
"""Okabe and Ito, Color Universal Design (2008)."""

_LOOK: dict[str, tuple[str, str, str]] = {
    # name: (label, colour, marker)
    "eager": ("eager", GREY, "o"),
    "wan": ("Wan fp32 formula", BLACK, "X"),
    "compile": ("torch.compile", SKY, "^"),
    "dtile": ("D-tile (paper's backward)", ORANGE, "s"),
    "fused": ("fused (ours)", RED, "D"),
    "cudnn": ("cuDNN", GREEN, "v"),
    "liger": ("Liger", BLUE, "P"),
    "quack": ("quack", PINK, "h"),
    "stream": ("plain stream", BLACK, "_"),
    "equal_token": ("equal-token (baseline)", GREY, "o"),
    "equal_token_same_bucket": ("equal-token, same bucket", BLACK, "X"),
    "dual_constraint": ("dual constraint (paper)", ORANGE, "s"),
    "dual_constraint_same_bucket": ("dual constraint, same bucket", "#8C6100", "p"),
    "quadratic_budget": ("quadratic budget", SKY, "^"),
    "equal_time": ("equal time", GREEN, "v"),
    "longest_first": ("longest first", BLUE, "P"),
    "balanced": ("balanced (ours)", RED, "D"),
}
_SPARE = ((BLUE, "<"), (GREEN, ">"), (PINK, "d"), (YELLOW, "*"))

ORDER: tuple[str, ...] = tuple(_LOOK)
"""Implementations and policies in the order in which legends and bars show them."""

_RC: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so the same glyphs everywhere
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "path",
    "svg.hashsalt": "repro",  # ids in an SVG are random without it
}


@contextmanager
def context() -> Iterator[None]:
    """Draw and save inside this: the style, whatever the user's matplotlibrc says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_RC)
        yield


def subplots(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (4.2, 3.2), **kwargs: Any
) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure with rows x columns axes of `size` inches each; the axes always come as an array [rows, columns]."""
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def color(name: str) -> str:
    """Colour of an implementation or policy; a name unknown here gets a spare one that depends on the name only."""
    return _LOOK[name][1] if name in _LOOK else _spare(name)[0]


def marker(name: str) -> str:
    """Marker of an implementation or policy."""
    return _LOOK[name][2] if name in _LOOK else _spare(name)[1]


def label(name: str) -> str:
    """What a reader calls an implementation or policy."""
    return _LOOK[name][0] if name in _LOOK else name.replace("_", " ")


def ordered(names: Sequence[str]) -> list[str]:
    """The distinct names in ORDER, unknown ones after them in alphabetical order."""
    return sorted(set(names), key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def face(name: str, kind: str) -> str:
    """Fill of a marker or bar: the colour where measured, none where simulated."""
    return color(name) if kind == "measured" else "white"


def series(
    axes: Axes,
    x: npt.ArrayLike,
    y: npt.ArrayLike,
    name: str,
    *,
    low: npt.ArrayLike | None = None,
    high: npt.ArrayLike | None = None,
    kind: str = "measured",
    line: bool = True,
    **kwargs: Any,
) -> None:
    """A line of points with 95% intervals in the look of `name`, sorted by x. low, high: ends of the intervals."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    order = np.argsort(xs, kind="stable")
    error = None
    if low is not None and high is not None:
        ends = np.stack([ys - np.asarray(low, float), np.asarray(high, float) - ys])
        error = np.nan_to_num(np.clip(ends, 0, None))[:, order]
    look: dict[str, Any] = {
        "color": color(name),
        "marker": marker(name),
        "markerfacecolor": face(name, kind),
        "linestyle": "-" if line else "none",
        "label": label(name),
        "elinewidth": 1,
        "capsize": 2,
    }
    axes.errorbar(xs[order], ys[order], error, **{**look, **kwargs})


def paper_value(axes: Axes, value: float, text: str, *, along: str = "x") -> None:
    """The paper's value as a dashed line: a height (along x, the default) or a position (along y)."""
    look: dict[str, Any] = {"color": GREY, "linestyle": (0, (5, 3)), "linewidth": 1.1, "zorder": 1.5}
    note: dict[str, Any] = {"color": GREY, "fontsize": 7.5, "textcoords": "offset points"}
    # The box keeps grid lines out of the text; data (lines have zorder 2) passes over both and is never hidden.
    note |= {"zorder": 1.6, "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}}
    if along == "x":
        axes.axhline(value, **look)
        axes.annotate(text, (1, value), xycoords=("axes fraction", "data"), xytext=(-2, 3), ha="right", **note)
    else:
        axes.axvline(value, **look)
        axes.annotate(text, (value, 1), xycoords=("data", "axes fraction"), xytext=(3, -9), ha="left", **note)


def kind_handles(kinds: Sequence[str]) -> list[Artist]:
    """Legend handles that explain filled and hollow markers, for the kinds that a figure shows."""
    return [
        Line2D([], [], linestyle="none", marker="o", color=GREY, markerfacecolor=fill, label=kind)
        for kind, fill in (("measured", GREY), ("simulated", "white"))
        if kind in set(kinds)
    ]


def legend(axes: Axes, kinds: Sequence[str] = ("measured",), **kwargs: Any) -> None:
    """Legend of the axes' series, each name once; filled and hollow are explained where both kinds, or only simulated
    values, are shown.
    """
    found: dict[str, Any] = {}
    for handle, text in zip(*axes.get_legend_handles_labels(), strict=True):
        found.setdefault(text, handle)
    extra = kind_handles(kinds) if "simulated" in set(kinds) else []
    axes.legend([*found.values(), *extra], [*found, *(str(h.get_label()) for h in extra)], **kwargs)


def token_axis(axes: Axes, tokens: Sequence[int] | npt.NDArray[np.int64], name: str = "tokens N") -> None:
    """Logarithmic x axis with the measured token counts as ticks, thinned where they would overlap."""
    axes.set_xscale("log", base=2)
    ticks: list[int] = []
    for t in sorted({int(t) for t in tokens}):
        if not ticks or t >= 1.5 * ticks[-1]:
            ticks.append(t)
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks], rotation=45, ha="right", rotation_mode="anchor")
    axes.minorticks_off()
    axes.set_xlabel(name)


def _spare(name: str) -> tuple[str, str]:
    return _SPARE[sum(name.encode()) % len(_SPARE)]
