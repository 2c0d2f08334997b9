"""Comparisons as a picture: ratios with their intervals for one device, times and share of the ceiling for several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from repro.compare_cells import Comparison, Shared
from repro.compare_judge import THRESHOLD, WORDS, direction
from repro.compare_view import selected
from repro.records import files
from repro.report import style
from repro.report.draw import picture

KINDS = (".png", ".svg", ".pdf")
_LETTERS = {"batch": "B", "tokens": "N", "dim": "D"}
MOST = 40
"""Cells in one picture: the most urgent, or the first."""
_LOOKS = {
    "SLOWER": (style.RED, ">"),
    "FASTER": (style.GREEN, "<"),
    "AMBIGUOUS": (style.ORANGE, "D"),
    "SAME": (style.GREY, "o"),
}


def write(comparison: Comparison, path: Path, threshold: float = THRESHOLD) -> None:
    """Draw what is shared to `path`, whose suffix decides the format. Raises ValueError where nothing can be drawn."""
    with style.context():
        content = picture(draw(comparison, threshold), path.suffix.lower().lstrip("."))
    files.replace(path, content)


def draw(comparison: Comparison, threshold: float = THRESHOLD) -> Figure:
    """The picture, inside `style.context()`. Raises ValueError where nothing can be drawn."""
    judged = [c for c in comparison.cells if any(j.ratio == j.ratio for j in c.judgements.values())]
    if judged:
        return _ratios(comparison, sorted(judged, key=lambda c: c.urgency)[:MOST], threshold)
    positive = [c for c in selected(comparison, True, 0)[0] if all(v.value > 0 for v in c.values.values())]
    cells = _one_unit(sorted(positive, key=_interest))
    if not cells:
        raise ValueError("nothing is shared that could be drawn: leave --figure out")
    return _values(comparison, cells[:MOST])


def _interest(cell: Shared) -> tuple[bool, bool, bool]:
    ceiling = any(v.ceiling is not None for v in cell.values.values())
    return not ceiling, direction(cell.unit) == 0, cell.case.get("impl", "fused") != "fused"


def _one_unit(cells: Sequence[Shared]) -> list[Shared]:
    """Cells of the first one's implementation, metric and unit, in one suite: they go on one axis."""
    key = [(c.suite, c.metric, c.unit, c.case.get("impl")) for c in cells]
    return [c for c, k in zip(cells, key, strict=True) if k == key[0]]


def _labels(cells: Sequence[Shared]) -> tuple[list[str], str]:
    """A name for each cell of what varies among them, and what does not."""
    several = len({c.suite for c in cells}) > 1
    facts = [{**({"suite": c.suite} if several else {}), **c.case, "metric": c.metric} for c in cells]
    names = list(dict.fromkeys(name for f in facts for name in f))
    varying = [n for n in names if len({f.get(n) for f in facts}) > 1]
    fixed = ", ".join(f"{n} {facts[0][n]}" for n in names if n not in varying and n in facts[0])
    return [" ".join(_told(n, f[n]) for n in varying if n in f) for f in facts], fixed


def _told(name: str, text: str) -> str:
    return f"{_LETTERS.get(name, name)}={int(text):,}" if text.isdigit() else text


def _ratios(comparison: Comparison, cells: Sequence[Shared], threshold: float) -> Figure:
    figure, grid = style.subplots(1, 1, 0.17 * len(cells) * len(comparison.baselines) + 1.3)
    ax = grid[0, 0]
    ax.axvspan(1 / (1 + threshold), 1 + threshold, color="#E9E9E9", zorder=0.5)
    ax.axvline(1, color=style.BLACK, linewidth=0.8)
    labels, fixed = _labels(cells)
    lines = [
        (f"{label}: {new}" if len(comparison.baselines) > 1 else label, c.judgements[new])
        for label, c in zip(labels, cells, strict=True)
        for new in comparison.baselines
        if new in c.judgements and c.judgements[new].ratio == c.judgements[new].ratio
    ]
    for word in WORDS:
        own = [(y, j) for y, (_, j) in enumerate(lines) if j.word == word]
        if own:
            color, marker = _LOOKS[word]
            value, low, high = (np.array([getattr(j, f) for _, j in own]) for f in ("ratio", "low", "high"))
            look: Any = {"fmt": marker, "color": color, "elinewidth": 1.2}
            look["label"] = f"{word}: {comparison.judged[word]}"
            ax.errorbar(value, [y for y, _ in own], xerr=[value - low, high - value], **look)
    ax.set_yticks(range(len(lines)), [label for label, _ in lines])
    ax.set_ylim(len(lines) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel(f"time over the baseline's\nshaded: ±{threshold:.0%}\n{fixed}")
    style.legend(figure, [])
    return figure


def _values(comparison: Comparison, cells: Sequence[Shared]) -> Figure:
    labels, fixed = _labels(cells)
    ceilings = any(v.ceiling is not None for c in cells for v in c.values.values())
    shown = [s.label for s in comparison.sources]
    figure, grid = style.subplots(
        1,
        1 + ceilings,
        (0.1 + 0.06 * len(shown)) * len(cells) + 1.3,
        sharey=True,
        width_ratios=[1.4, 1][: 1 + ceilings],
    )
    looks = style.device_looks(shown)
    for i, label in enumerate(shown):
        color, marker = looks[label]
        own = [(y, c.values[label]) for y, c in enumerate(cells) if label in c.values]
        place = np.array([y for y, _ in own]) + 0.6 * ((i + 0.5) / len(shown) - 0.5)
        value, low, high = (np.array([getattr(v, f) for _, v in own]) for f in ("value", "low", "high"))
        look: Any = {"fmt": marker, "color": color, "elinewidth": 1.2, "label": label}
        if any(v.kind != "measured" for _, v in own):
            look["mfc"] = "white"
        grid[0, 0].errorbar(value, place, xerr=np.clip([value - low, high - value], 0, None), **look)
        if ceilings:
            known = [(y, v.ceiling) for y, (_, v) in zip(place, own, strict=True) if v.ceiling is not None]
            grid[0, 1].plot([c for _, c in known], [y for y, _ in known], marker, color=color)
    ax = grid[0, 0]
    ax.set_xscale("log")
    style.log_ticks(ax.xaxis)
    ax.set_yticks(range(len(cells)), labels)
    ax.set_ylim(len(cells) - 0.4, -0.6)
    ax.set_xlabel(f"{cells[0].metric}, {cells[0].unit}\n{fixed.removesuffix(f', metric {cells[0].metric}')}")
    if ceilings:
        grid[0, 1].set(xlabel="% of the device's ceiling", xlim=(0, None))
    style.legend(figure, {c.kind for c in cells})
    return figure
