"""The look that all figures share, and the few marks that must mean the same everywhere.

    colour            who: one per implementation or policy (Okabe and Ito's colour-blind safe set)
    colour            which device, where a figure has several
    filled marker     measured            hollow marker, hatched bar   simulated
    dashed grey line  what the paper says, told beside the axes

A figure is WIDTH inches wide whatever it holds and has no type below SMALLEST points, so that it can be read in a
column 89 mm wide, half a printed page, where that becomes 5 points (the least that Nature's guide for figures allows).

A suite's `draw` is called inside `context()`; it makes its figure with `subplots` and returns it, unsaved. No pyplot:
figures are objects without global state, so that a redraw of the same rows gives the same bytes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, RED, PINK, BLACK, GREY = "#0072B2", "#D55E00", "#CC79A7", "#000000", "#7F7F7F"
"""Okabe and Ito, Color Universal Design (2008)."""
NOTE = "#595959"
"""Grey text: 7:1 against white, where GREY has 4:1."""
HATCH = "////"
ABOVE = 14.0
"""Points between axes and title where the paper's value is told in between."""

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
_LINES = {"stream": ":", "wan": "--"}
"""What tells those apart that share black; everyone else has a whole line."""
_DEVICES = tuple(zip((BLUE, ORANGE, GREEN, PINK, BLACK, SKY, RED, GREY), "osD^vPXh", strict=True))
_SPARE = ((BLUE, "<"), (GREEN, ">"), (PINK, "d"), (YELLOW, "*"))

ORDER: tuple[str, ...] = tuple(_LOOK)
"""Implementations and policies in the order in which legends and bars show them."""

WIDTH = 5.2
"""Inches of every figure."""
SMALLEST = 7.5
"""Points of the smallest type: ticks, notes, values at bars."""

_PAPER_LINE: Any = {"color": GREY, "linestyle": (0, (5, 3)), "linewidth": 1.1}

_RC: Any = {
    "figure.dpi": 200,  # of the layout too, so that both files have it
    "savefig.dpi": 200,
    "font.family": "DejaVu Sans",  # comes with Matplotlib, so the same glyphs everywhere
    "font.size": 8,
    "xtick.labelsize": SMALLEST,
    "ytick.labelsize": SMALLEST,
    "axes.titlesize": 8.5,
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
    "legend.fontsize": SMALLEST,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.2,
    "hatch.linewidth": 0.8,
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
    rows: int = 1, columns: int = 1, height: float = 2.2, width: float = WIDTH, **kwargs: Any
) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure `width` inches wide with rows of `height` inches; its axes always come as an array [rows, columns]."""
    figure = Figure(figsize=(width, height * rows), layout="constrained")
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


def device_looks(devices: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each device, in alphabetical order."""
    return {d: _DEVICES[i % len(_DEVICES)] for i, d in enumerate(sorted(set(devices)))}


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
        "linestyle": _LINES.get(name, "-") if line else "none",
        "label": label(name),
        "elinewidth": 1.2,
    }
    axes.errorbar(xs[order], ys[order], error, **{**look, **kwargs})


def paper_value(axes: Axes, value: float, text: str, *, along: str = "x") -> None:
    """The paper's value as a dashed line with its text beside the axes, where it hides no data and no data hides it.

    along: "x" for a height, told on the right; "y" for a position, told above (give the title a pad of ABOVE).
    """
    look: dict[str, Any] = {**_PAPER_LINE, "zorder": 1.5}
    note: dict[str, Any] = {"color": NOTE, "fontsize": SMALLEST, "textcoords": "offset points"}
    if along == "x":
        axes.axhline(value, **look)
        place: Any = {"xy": (1, value), "xycoords": ("axes fraction", "data"), "xytext": (3, 0), "va": "center"}
        axes.annotate("\n".join(line for part in text.split(": ") for line in textwrap.wrap(part, 9)), **place, **note)
    else:
        axes.axvline(value, **look)
        place = {"xy": (value, 1), "xycoords": ("data", "axes fraction"), "xytext": (0, 2), "ha": "center"}
        axes.annotate(text, **place, **note)


def bar_values(axes: Axes, bars: BarContainer, form: str) -> None:
    """Tell each bar's value at its end, on white where a line passes."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    axes.bar_label(bars, fmt=form, fontsize=SMALLEST, padding=2, bbox=box)


def kind_handles(kinds: Sequence[str], bars: bool = False) -> list[Artist]:
    """Legend handles that explain filled and hollow marks, for the kinds that a figure shows. bars: marks are bars."""
    looks = (("measured", GREY), ("simulated", "white"))
    if bars:
        return [
            Patch(facecolor=fill, edgecolor=GREY, hatch=HATCH if fill == "white" else None, label=kind)
            for kind, fill in looks
            if kind in set(kinds)
        ]
    return [
        Line2D([], [], linestyle="none", marker="o", color=GREY, markerfacecolor=fill, label=kind)
        for kind, fill in looks
        if kind in set(kinds)
    ]


def legend(
    figure: Figure, kinds: Iterable[str], axes: Iterable[Axes] | None = None, bars: bool = False, paper: str = ""
) -> None:
    """One legend above the figure: each name once, then what marks of these kinds look like.

    axes: whose series it explains; None for all. bars: the marks of kinds are bars. paper: what dashed lines say.
    """
    found: dict[str, Any] = {}
    for ax in figure.axes if axes is None else axes:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(text, handle)
    shown = set(kinds)
    if shown == {"measured"}:  # nothing to tell apart, and a filled mark would read as one more series
        found["all measured"] = Line2D([], [], linestyle="none")
    else:
        found |= {str(h.get_label()): h for h in kind_handles(sorted(shown), bars)}
    if paper:
        found[paper] = Line2D([], [], **_PAPER_LINE)
    columns = _columns(list(found), figure.get_figwidth())
    figure.legend(list(found.values()), list(found), loc="outside upper center", ncols=columns)


def _columns(labels: Sequence[str], width: float) -> int:
    """The most columns of a legend that fit into `width` inches; legends are filled column by column."""
    handle, letter = 0.42, 0.6 * SMALLEST / 72
    for columns in range(len(labels), 1, -1):
        longest = [max(map(len, column)) for column in np.array_split(np.array(labels, object), columns)]
        if sum(handle + letter * n for n in longest) <= width:
            return columns
    return 1


def end_labels(axes: Axes, ends: Sequence[tuple[float, float, str, str]], lines: int = 1) -> None:
    """Tell lines apart at their right ends: (x, y, text, colour) each, moved up or down where texts would collide.

    Call it when the limits of y stand. lines: of the longest text.
    """
    low, high = axes.get_ylim()
    figure = axes.get_figure(root=True)
    assert figure is not None
    tall = axes.get_position().height * figure.get_figheight()  # before the layout, hence a little generous
    apart = lines * 0.13 / tall * (high - low)
    ordered_ends = sorted(ends, key=lambda end: end[1])
    places: list[float] = []
    for _, y, _, _ in ordered_ends:
        places.append(max(y, places[-1] + apart) if places else y)
    look: dict[str, Any] = {"va": "center", "fontsize": SMALLEST, "annotation_clip": False}
    for (x, _, text, color), y in zip(ordered_ends, places, strict=True):
        axes.annotate(text, (x, y), (6, 0), textcoords="offset points", color=color, **look)


def token_axis(axes: Axes, tokens: Sequence[int] | npt.NDArray[np.int64], name: str = "tokens N") -> None:
    """Logarithmic x axis with the measured token counts as ticks, thinned where they would overlap."""
    axes.set_xscale("log", base=2)
    known = sorted({int(t) for t in tokens})
    # text turned by 45 degrees takes about an eighth of a panel two of which make a figure
    apart = max(1.5, (known[-1] / known[0]) ** (1 / 8)) if known else 1.5
    ticks: list[int] = []
    for t in known:
        if not ticks or t >= apart * ticks[-1]:
            ticks.append(t)
    axes.set_xticks(ticks, [f"{t:,}" for t in ticks], rotation=45, ha="right", rotation_mode="anchor")
    axes.minorticks_off()
    axes.set_xlabel(name)


def log_ticks(axis: Axis) -> None:
    """Ticks 1, 2, 5, 10, ... in plain numbers on a logarithmic axis, only powers of ten where it spans many."""
    low, high = axis.get_view_interval()
    wide = high > 300 * low > 0
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def _spare(name: str) -> tuple[str, str]:
    return _SPARE[sum(name.encode()) % len(_SPARE)]
