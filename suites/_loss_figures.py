"""Figures of `loss_parity`: curves with bands over seeds, and final differences against the margin of equivalence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.suite import Figure
from suites._campaign import interval

if TYPE_CHECKING:
    import pandas as pd

Variant = tuple[str, str, str]
WEIGHTINGS = {"batch_mean": "batch means", "sample": "samples alike"}
Differences = Callable[..., "np.ndarray[Any, Any]"]
COLORS = ("#000000", "#D55E00", "#E69F00", "#56B4E9", "#CC79A7", "#0072B2", "#009E73")


def draw(own: pd.DataFrame, differences: Differences, variants: Sequence[Variant], margin: float) -> list[Figure]:
    """Figures of each device and of all. differences: `loss_parity.differences`; the first variant is the baseline."""
    figures = [
        f
        for device, table in own.groupby("device", sort=True)
        for f in _draw_device(str(device), table, differences, variants, margin)
    ]
    return figures + _draw_devices(own, differences, variants, margin)


def _draw_device(
    device: str, table: pd.DataFrame, differences: Differences, variants: Sequence[Variant], margin: float
) -> list[Figure]:
    from repro.report import style

    curves = table[(table["corpus"] == "moving-shapes") & table["metric"].str.startswith("curve_at_")]
    if curves.empty:
        return []
    samples, bins = int(table["samples"].max()), curves["metric"].nunique()
    named = {v: f"{style.label(v[0])}, {v[1]}, {WEIGHTINGS[v[2]]}" for v in variants}
    shown = [(v, c) for v, c in zip(variants, COLORS, strict=False) if _of(curves, v).any()]
    sides = [(v, c) for v, c in shown if v != variants[0]]
    compared = [(named[v], c, c, differences(table, v)) for v, c in sides]
    real = [(f"real clips: {named[v]}", c, "none", differences(table, v, "real-small")) for v, c in sides]
    compared += [side for side in real if side[-1].size]
    lines = (1.9, 0.45 + 0.33 * max(1, len(compared)))  # two lines of text for each that is compared
    figure, axes = style.subplots(2, 1, 0.5 + sum(lines) / 2, height_ratios=lines)
    top, bottom = axes[:, 0]
    for variant, color in shown:
        own = curves[_of(curves, variant)]
        by_seed = own.assign(k=own["metric"].str.removeprefix("curve_at_").astype(int))
        by_seed = by_seed.pivot_table(index="k", columns="seed", values="value").sort_index()
        x = (by_seed.index.to_numpy() + 0.5) * samples / bins
        first = variant == variants[0]  # drawn wider, so that curves which lie on it hide none of it
        top.plot(x, by_seed.mean(axis=1), color=color, lw=2.8 if first else 1.2, label=named[variant])
        top.fill_between(x, by_seed.min(axis=1), by_seed.max(axis=1), color=color, alpha=0.12, linewidth=0)
    for at, (_, color, fill, each) in enumerate(compared):
        bottom.plot(each, np.full(each.size, at), "o", color=color, markerfacecolor=fill, ms=4)
        if each.size > 1:
            i = interval(each)
            ends = [[i.value - i.low], [i.high - i.value]]
            bottom.errorbar(i.value, at + 0.27, xerr=ends, fmt="|", color=color, capsize=2)
    top.set(xlabel="samples seen", ylabel="training loss", xlim=(0, samples), ylim=(0, None))
    for end in (-margin, margin):
        bottom.axvline(end, color=style.GREY, ls="--")
    bottom.axvline(0, color=style.BLACK, linewidth=0.8)
    texts = [text.replace(", ", ",\n", 1) + f"; n = {each.size}" for text, _, _, each in compared]
    bottom.set_yticks(range(len(compared)), texts)
    bottom.set_ylim(len(compared) - 0.5, -0.5)
    bottom.set_xlabel("final held-out loss over the baseline's\nof the same seed, %")
    bottom.grid(axis="y", visible=False)
    style.legend(figure, ["measured"], axes=[top])
    caption = (
        f"Loss at equal samples on {device}: a small model on procedural moving shapes. Above: mean over seeds with "
        f"their range. Below: a point a seed, against {named[variants[0]]}, and under the points their mean with its "
        f"95% interval; equivalent where that lies within {margin:g}% (dashed)."
    )
    if any(side[-1].size for side in real):
        caption += " Open points: trained on clips and photographs instead."
    return [Figure(f"loss_parity-{device}", figure, caption, ("T5",))]


def _draw_devices(
    own: pd.DataFrame, differences: Differences, variants: Sequence[Variant], margin: float
) -> list[Figure]:
    """Final differences on all devices."""
    import pandas as pd

    from repro.report import devices

    found = []
    for device, table in own.groupby("device", sort=True):
        for variant in variants[1:]:
            each = differences(table, variant)
            if each.size:
                ends = {"ci_low": each.min(), "ci_high": each.max()}
                row = f"{variant[0]}, {variant[1]}\n{variant[2]}"
                found.append({"device": device, "row": row, "kind": "measured", "value": each.mean(), **ends})
    panel = pd.DataFrame(found, columns=["device", "row", "kind", "value", "ci_low", "ci_high"])
    if not devices.several(panel):
        return []
    name = "final loss over the baseline's, %"
    figure = devices.dots({name: panel}, {name: (f"margin: {margin:g}%", margin)})
    return [
        Figure("loss_parity-devices", figure, "Final held-out loss on each device; bars: range over seeds.", ("T5",))
    ]


def _of(table: pd.DataFrame, variant: Variant) -> pd.Series:
    policy, adaln, weighting = variant
    return (table["policy"] == policy) & (table["adaln"] == adaln) & (table["weighting"] == weighting)
