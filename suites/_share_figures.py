"""Figures and table of `kernel_share`: AdaLN's share of a step, and what the fused op gains, against length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from repro.measure.stats import Interval
from repro.report.documents import NOTHING, by_adaln, kept, table
from repro.suite import Figure

if TYPE_CHECKING:
    import pandas as pd

Gain = Callable[..., Interval | None]


def draw(own: pd.DataFrame, gain: Gain, lengths: Sequence[int], budget: int) -> list[Figure]:
    """Figures of each device and of all. gain: `kernel_share.gain`; lengths: of micro-batches of `budget` tokens."""
    own = own[own["checkpointing"] == "full"]
    own = own[own["batch"] == np.maximum(1, budget // own["tokens"].astype(int))]
    figures = [f for device, table in own.groupby("device", sort=True) for f in _draw_device(str(device), table, gain)]
    return figures + _draw_devices(own, gain, lengths)


def _draw_device(device: str, table: pd.DataFrame, gain: Gain) -> list[Figure]:
    from repro.report import style

    shares = table[table["metric"] == "norm_modulate_share"]
    if shares.empty:
        return []
    models = [m for m in ("wan-1.3b", "wan-14b") if (shares["model"] == m).any()]
    figure, axes = style.subplots(2, len(models), 2.2)
    for column, model in enumerate(models):
        top, bottom = axes[:, column]
        own = shares[shares["model"] == model]
        for adaln in style.ordered(list(own["adaln"])):
            at = own[own["adaln"] == adaln]
            style.series(top, at["tokens"], at["value"], adaln, low=at["ci_low"], high=at["ci_high"])
        for other in ("eager", "wan"):
            known = [(s, g) for s in sorted(own["tokens"].unique()) if (g := gain(table, model, other, (int(s),)))]
            if known:
                x, found = zip(*known, strict=True)
                low, high = [g.low for g in found], [g.high for g in found]
                style.series(bottom, x, [g.value for g in found], other, low=low, high=high)
        bottom.axhline(0, color=style.BLACK, linewidth=0.8)
        style.paper_value(bottom, 25, "paper: >25%")
        top.set_title(f"{model}, {int(own['layers'].max())} blocks")
        top.set_ylim(0, 1.08 * top.get_ylim()[1])
        for ax in (top, bottom):
            style.token_axis(ax, own["tokens"].to_numpy(), "tokens of one sample, S" if ax is bottom else "")
    axes[0, 0].set_ylabel("AdaLN's share of a step, %")
    axes[1, 0].set_ylabel("fused: tokens/s gained, %")
    style.legend(figure, ["measured"])
    layers = ", ".join(f"{m}: {int(table[table['model'] == m]['layers'].max())} blocks" for m in models)
    caption = (
        f"Whole steps of the trainer on {device} ({layers}; full checkpointing, about 48,000 tokens a micro-batch). "
        "Above: share of the step inside norm-modulate, forward, recomputed and backward. Below: by how much more "
        "tokens/s the fused op takes than eager and Wan's formula. The longer the samples, the "
        "more of a step is attention."
    )
    return [Figure(f"kernel_share-{device}", figure, caption, ("T6",))]


def _draw_devices(own: pd.DataFrame, gain: Gain, lengths: Sequence[int]) -> list[Figure]:
    """The gain over equal-token steps on all devices."""
    import pandas as pd

    from repro.report import devices

    found = [
        {"device": device, "row": f"{model}, over {other}", "kind": "measured", "value": g.value, "ci_low": g.low,
         "ci_high": g.high}
        for device, table in own.groupby("device", sort=True)
        for model in ("wan-1.3b", "wan-14b")
        for other in ("eager", "wan")
        if (g := gain(table, model, other, tuple(lengths)))
    ]  # fmt: skip
    panel = pd.DataFrame(found, columns=["device", "row", "kind", "value", "ci_low", "ci_high"])
    if not devices.several(panel):
        return []
    name = "gain in tokens/s by the fused op, %"
    figure = devices.dots({name: panel}, {name: ("paper: >25%", 25.0)})
    caption = "Whole training steps of equal-token micro-batches with the fused op over the other AdaLNs, one GPU each."
    return [Figure("kernel_share-devices", figure, caption, ("T6",))]


def steps_table(rows: pd.DataFrame) -> str:
    """Markdown: steps and peak memory under fused and eager, where both were measured, device by device."""
    if rows.empty:
        return NOTHING
    cells = []
    for place, at in rows.groupby(["device", "model", "layers", "checkpointing", "batch", "tokens"], sort=False):
        device, model, layers, checkpointing, batch, tokens = map(str, place)
        of = by_adaln(at)
        steps, peaks = ([of.get((m, a)) for a in ("eager", "fused")] for m in ("step_time", "peak_memory"))
        eager, fused = steps
        if eager is None or fused is None:
            continue
        told = kept(fused.high < eager.low, fused.low > eager.high, "faster", "slower")
        cells.append(
            [device, f"{model}, {layers} blocks", checkpointing, f"{batch} x {int(tokens):,}"]
            + [f"{i.value:.1f} [{i.low:.1f}, {i.high:.1f}]" for i in (eager, fused)]
            + [told, *("unknown" if p is None else f"{p.value:.2f}" for p in peaks)]
        )
    head = ["device", "model", "checkpointing", "B x S", "eager, ms", "fused, ms", "fused is"]
    return table([*head, "peak with eager, GB", "with fused"], cells) if cells else NOTHING
