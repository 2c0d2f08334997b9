"""Figures of `throughput_measured`: throughput and balance of measured epochs, and steps against their replay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from repro.balance import assumptions
from repro.suite import Figure

if TYPE_CHECKING:
    import pandas as pd

PANELS = {
    "tokens_per_s": "thousand tokens/s",
    "share_of_perfect": "share of perfect balance",
}
MEETINGS = {"micro_batch": "ranks meet in each micro-batch", "step": "ranks meet once a step"}
PROTOCOLS = {"as_published": "one micro-batch a step, as published", "matched": "samples a step matched"}
WORST = assumptions.WORST_CORPUS


def draw(own: pd.DataFrame, bars: Mapping[str, float]) -> list[Figure]:
    """Figures of all devices with epochs; bars: % that the replay's errors are to stay within, by metric."""
    figures = []
    for device, table in own.groupby("device", sort=True):
        figures += [*_draw_throughput(str(device), table), *_draw_replay(str(device), table, bars)]
    return figures + _draw_devices(own)


def _draw_throughput(device: str, table: pd.DataFrame) -> list[Figure]:
    from repro.report import style

    panels = {m: q for m, q in PANELS.items() if m != "share_of_perfect" or int(table["ranks"].max()) > 1}
    shown = table[table["metric"].isin(panels)]
    if shown.empty:
        return []
    mixes = [(p, worst) for worst in (False, True) for p in PROTOCOLS if _mix(shown, p, worst).any()]
    names = style.ordered(list(shown["policy"]))
    cells = [(a, s) for s in MEETINGS for a in ("eager", "wan", "fused") if _cell(shown, a, s).any()]
    height = 0.09 * len(names) * len(cells) + 0.9 + 0.2 * (len(cells) + 1) / len(mixes)  # the legend's lines too
    figure, axes = style.subplots(len(mixes), len(panels), height, sharey=True)
    for i, (protocol, worst) in enumerate(mixes):
        for ax, (metric, quantity) in zip(axes[i], panels.items(), strict=True):
            of = shown[_mix(shown, protocol, worst) & (shown["metric"] == metric)]
            scale = 1e-3 if metric == "tokens_per_s" else 1.0
            for k, (adaln, sync) in enumerate(cells):
                own = of[_cell(of, adaln, sync)]
                place = [names.index(p) + 0.8 * ((k + 0.5) / len(cells) - 0.5) for p in own["policy"]]
                value, low, high = (scale * own[c].to_numpy(float) for c in ("value", "ci_low", "ci_high"))
                face = style.color(adaln) if sync == "micro_batch" else "#DDDDDD"
                ax.errorbar(
                    value, place, xerr=np.stack([value - low, high - value]).clip(0), fmt=style.marker(adaln), ms=4,
                    color=style.color(adaln), mfc=face, elinewidth=1.0, label=f"{style.label(adaln)}, {MEETINGS[sync]}"
                )  # fmt: skip
            ax.set_yticks(range(len(names)), [style.label(n) for n in names])
            ax.set_ylim(len(names) - 0.5, -0.5)
            ax.set_xlim(0, 1.04 * ax.get_xlim()[1])  # room for the marks at its end
            ax.set_xlabel(quantity)
            ax.grid(axis="y", visible=False)
        axes[i, 0].set_title(f"{WORST if worst else assumptions.CORPUS}: {PROTOCOLS[protocol]}")
        if "share_of_perfect" in panels:
            axes[i, -1].axvline(1, color=style.GREY, linewidth=0.8)
    style.legend(figure, ["measured"])
    what = "Tokens/s of the epoch"
    if "share_of_perfect" in panels:
        what = f"Left: {what.lower()}; right: time of full micro-batches on all ranks at once over time taken"
    caption = (
        f"Whole epochs of the trainer on {device}, {_about(table)}: the same samples under every policy, the same "
        f"schedule under every AdaLN. {what}. Ranks meet in each micro-batch or once a step. Bars are 95% intervals "
        "over steps."
    )
    return [Figure(f"throughput_measured-{device}", figure, caption, ("T1", "T2", "T6"))]


def _draw_replay(device: str, table: pd.DataFrame, bars: Mapping[str, float]) -> list[Figure]:
    from matplotlib.ticker import PercentFormatter

    from repro.report import style

    steps = table[table["metric"].str.startswith(("step_at_", "replay_at_"))]
    if steps.empty:
        return []
    key = ["policy", "adaln", "sync", "protocol", "corpus"]
    parts = steps["metric"].str.partition("_at_")
    wide = steps.assign(what=parts[0], at=parts[2]).pivot_table(index=[*key, "at"], columns="what", values="value")
    wide = wide.dropna().reset_index()
    errors = table[table["metric"].isin(bars)]
    figure, (axes,) = style.subplots(1, 2, 3.0)
    left, right = axes
    for policy in style.ordered(list(wide["policy"])):
        own, color = wide[wide["policy"] == policy], style.color(policy)
        look: Any = {"color": color, "marker": style.marker(policy), "ls": "none"}
        left.plot(own["step"] / 1e3, own["replay"] / own["step"] - 1, ms=3, alpha=0.6, **look)
        cells = errors[errors["policy"] == policy].pivot_table(index=key, columns="metric", values="value").abs()
        cells = cells.reindex(columns=list(bars))
        right.plot(cells["replay_error"], cells["replay_total_error"], label=style.label(policy), **look)
    left.axhline(0, color=style.BLACK, linewidth=0.8)
    left.yaxis.set_major_formatter(PercentFormatter(1))
    left.set(title="steps", xlabel="step as measured, s", ylabel="simulated / measured - 1", xlim=(0, None))
    right.axvline(bars["replay_error"], color=style.GREY, ls="--")
    right.axhline(bars["replay_total_error"], color=style.GREY, ls="--")
    right.set(title="epochs", xlabel="mean |error| of a step, %", ylabel="|error| of the epoch, %")
    right.set(xlim=(0, None), ylim=(0, None))
    style.legend(figure, ["measured"])
    caption = (
        f"The simulator against reality on {device}, {_about(table)}: steps as the simulator has them from solo times "
        "(all ranks taking the same shape at once, in the same run) against the same steps as they were taken. Left: "
        "every step of every epoch; right: an epoch each, and what is asked for (dashed: "
        f"{bars['replay_error']:g}% a step, {bars['replay_total_error']:g}% an epoch)."
    )
    return [Figure(f"replay-{device}", figure, caption)]


def _draw_devices(own: pd.DataFrame) -> list[Figure]:
    """Throughput of the cells that every device has: ranks meet in each micro-batch, as published."""
    from repro.report import devices, style

    at = own[_mix(own, "as_published", False) & (own["sync"] == "micro_batch") & own["adaln"].isin(["eager", "fused"])]
    at = at[at["metric"].isin(PANELS)]
    if not devices.several(at):
        return []
    a_rank = at[at["metric"] == "tokens_per_s"].copy()
    for column in ("value", "ci_low", "ci_high"):
        a_rank[column] = a_rank[column] / a_rank["ranks"].astype(int) / 1e3
    panels = {"thousand tokens/s a GPU": a_rank, PANELS["share_of_perfect"]: at[at["metric"] == "share_of_perfect"]}
    panels = {
        name: t.assign(row=t["policy"].map(style.label) + ", " + t["adaln"]).sort_values(["policy", "adaln"])
        for name, t in panels.items()
        if len(t)
    }
    caption = "Measured epochs of the trainer on each device, one micro-batch a step and rank. Bars are 95% intervals."
    return [Figure("throughput_measured-devices", devices.dots(panels), caption, ("T1", "T2", "T6"))]


def _cell(table: pd.DataFrame, adaln: str, sync: str) -> pd.Series:
    return (table["adaln"] == adaln) & (table["sync"] == sync)


def _mix(table: pd.DataFrame, protocol: str, worst: bool) -> pd.Series:
    return (table["protocol"] == protocol) & ((table["corpus"] == WORST) == worst)


def _about(table: pd.DataFrame) -> str:
    ranks, layers = int(table["ranks"].max()), int(table["layers"].max())
    return f"{table['model'].iloc[0]} with {layers} blocks, {ranks} rank{'s' if ranks > 1 else ''}"
